"""A fetched target is data: nothing in it is executed, and nothing in it names a file elsewhere.

Loaders run a model's own Python code where its JSON files ask for it (`auto_map`) and a user agrees. Here no
code is fetched (resolve.FILE_PATTERNS), `auto_map` is removed from our copy, and a target that then cannot be
loaded is refused. There is no switch: supported architectures need no code but vLLM's and transformers', and
supported tokenizers need no code but tokenizer.json.
"""

import json
import logging
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)
INDEX_PATTERN = "*.safetensors.index.json"


def sanitize(target_dir: str | Path) -> None:
    """Make a fetched target safe to load.

    Raises:
        ValueError: if its directory holds code, or an index names a file outside of it; names both and the
            remedy.
    """
    root = Path(target_dir)
    if code := sorted(path.name for path in root.rglob("*.py")):
        remedy = "targets with code of their own are not supported"
        raise ValueError(f"{root} must hold no code, got {', '.join(code)}; {remedy}")
    for path in sorted(root.glob(INDEX_PATTERN)):
        _check_index(path)
    for path in sorted(root.glob("*.json")):
        content = _read(path)
        if isinstance(content, dict) and "auto_map" in content:
            logger.warning("%s asks for code of the target's own (auto_map), which is never run", path.name)
            del content["auto_map"]
            path.write_text(json.dumps(content, indent=2, ensure_ascii=False))


def _check_index(path: Path) -> None:
    content = _read(path)
    files = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(files, dict):
        raise ValueError(f"{path} has no weight_map; fetch the target again")
    for name in sorted({str(file) for file in files.values()}):
        if not name or Path(name).name != name or name in (".", ".."):
            raise ValueError(f"{path} must name files next to it, got {name!r}; do not use this target")


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except ValueError as e:
        raise ValueError(f"{path} is not readable ({e}); fetch the target again") from e
