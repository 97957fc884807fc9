"""Convert a GGUF file to config, tokenizer and bfloat16 safetensors with transformers."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


def convert_gguf(path: Path, out_dir: Path, with_weights: bool) -> None:
    """Write config and tokenizer as save_pretrained does, and the dequantised weights if asked."""
    try:
        import accelerate  # noqa: F401
        import gguf  # noqa: F401
    except ImportError as e:
        remedy = "pip install 'eagle3-flyte[gguf]'"
        raise ValueError(f"target {path} needs the packages gguf and accelerate; {remedy}") from e
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

    logger.info("converting %s to %s", path, "safetensors" if with_weights else "config and tokenizer")
    source: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
    with _read_once():
        if with_weights:
            model = AutoModelForCausalLM.from_pretrained(
                path.parent, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True), **source
            )
            model.save_pretrained(out_dir)
        else:
            AutoConfig.from_pretrained(path.parent, **source).save_pretrained(out_dir)
        AutoTokenizer.from_pretrained(path.parent, **source).save_pretrained(out_dir)


@contextmanager
def _read_once() -> Iterator[None]:
    """Make transformers read the file once instead of three times, and build the table of names once.

    With a vocabulary of 49k these repetitions take most of the time.
    """
    import gguf
    import numpy as np

    class Reader(gguf.GGUFReader):  # type: ignore[misc]
        def __setattr__(self, name: str, value: Any) -> None:
            # Slicing a memmap takes five times as long as slicing a plain array on the same memory.
            object.__setattr__(self, name, value.view(np.ndarray) if name == "data" else value)

    names = ("GGUFReader", "get_tensor_name_map")
    originals = {name: getattr(gguf, name) for name in names}
    gguf.GGUFReader = cache(Reader)
    gguf.get_tensor_name_map = cache(gguf.get_tensor_name_map)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(gguf, name, original)
