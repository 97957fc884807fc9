"""Read and check the recipe's chat template, and make it the only one in a target's directory."""

import json
import shutil
from pathlib import Path

from eagle3.files import is_remote, read_bytes
from eagle3.uris import redact, redact_secrets

FILE_NAME = "chat_template.jinja"


@redact_secrets()
def read_chat_template(uri: str) -> str:
    """Read a Jinja file by path or URL; ValueError if no template, ConnectionError if a retry may succeed."""
    import jinja2
    from transformers.utils.chat_template_utils import render_jinja_template

    name = f"target.chat_template {redact(uri)}"
    remedy = "give the path or URL of a Jinja file"
    try:
        data = read_bytes(uri if is_remote(uri) else str(Path(uri).expanduser()))
    except ConnectionError:
        raise
    except (OSError, ValueError, ImportError) as e:
        raise ValueError(f"{name} cannot be read ({e}); {remedy}") from e
    if data is None:
        raise ValueError(f"{name} does not exist; {remedy}")
    if not data.strip():
        raise ValueError(f"{name} is empty; {remedy}")
    try:
        text = data.decode()
        # Compile it with the tags that only chat templates have; no conversation is rendered.
        render_jinja_template([], chat_template=text)
    except UnicodeDecodeError as e:
        raise ValueError(f"{name} must be UTF-8 text ({e}); give a Jinja file") from e
    except jinja2.TemplateSyntaxError as e:
        raise ValueError(f"{name}, line {e.lineno}: {e.message}; correct the template") from e
    return text


def put_chat_template(target_dir: str | Path, text: str) -> None:
    """Write `text` as the target's chat template and remove all others, which loaders may prefer."""
    root = Path(target_dir)
    for other in ("chat_template.json", *(f.name for f in root.glob("*.jinja"))):
        (root / other).unlink(missing_ok=True)
    shutil.rmtree(root / "additional_chat_templates", ignore_errors=True)
    config_path = root / "tokenizer_config.json"
    if config_path.is_file():
        config = json.loads(config_path.read_text(encoding="utf-8"))
        if config.pop("chat_template", None) is not None:
            config_path.write_text(json.dumps(config, indent=2, ensure_ascii=False), encoding="utf-8")
    (root / FILE_NAME).write_bytes(text.encode())
