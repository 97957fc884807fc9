"""A chat template given beside a target: read and checked in seconds, and put where every reader of the target finds it alone."""

import json
import shutil
from pathlib import Path

from eagle3.files import is_remote, read_bytes
from eagle3.uris import redact, redact_secrets

FILE_NAME = "chat_template.jinja"


@redact_secrets()
def read_chat_template(place: str) -> str:
    """Read a Jinja file by path or URL.

    Raises:
        ValueError: if it is not there, no text or no template; names it and what to do.
        ConnectionError: where another try may help.
    """
    import jinja2
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        data = read_bytes(place if is_remote(place) else str(Path(place).expanduser()))
    except ConnectionError:
        raise
    except (OSError, ValueError, ImportError) as e:
        raise ValueError(
            f"target.chat_template {redact(place)} cannot be read ({e}); give the path or URL of a Jinja file"
        ) from e
    if not (data or b"").strip():
        what = "is empty" if data is not None else "is not there"
        raise ValueError(f"target.chat_template {redact(place)} {what}; give the path or URL of a Jinja file")
    try:
        text = (data or b"").decode()
        # Compiled as for a conversation, with the tags that only chat templates have; none is rendered.
        render_jinja_template([], chat_template=text)
    except UnicodeDecodeError as e:
        raise ValueError(
            f"target.chat_template {redact(place)} must be UTF-8 text ({e}); give a Jinja file"
        ) from e
    except jinja2.TemplateSyntaxError as e:
        raise ValueError(
            f"target.chat_template {redact(place)}, line {e.lineno}: {e.message}; correct the template"
        ) from e
    return text


def put_chat_template(target_dir: str | Path, text: str) -> None:
    """Make `text` the one chat template of a target's directory.

    Besides its own file, a tokenizer's config, a processor's file or files of named templates may hold one, which readers prefer
    for tools or for images.
    """
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
