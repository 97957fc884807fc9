"""Make a fetched target safe: it runs no code of its own, and it names no file outside its directory.

Loaders run a model's own Python code if its JSON files have `auto_map` and the user agrees. We fetch no code
(resolve.FILE_PATTERNS) and remove `auto_map` from our copy. There is no switch: the supported architectures
need only the code of vLLM and transformers.
"""

import json
import logging
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)
INDEX_PATTERN = "*.safetensors.index.json"


def sanitize(target_dir: str | Path) -> None:
    """Remove `auto_map`; ValueError if the directory has code, or an index names a file outside of it."""
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
