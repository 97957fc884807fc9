"""GGUF files to config, tokenizer and bfloat16 safetensors, by transformers and the file's own metadata."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


def convert_gguf(path: Path, out_dir: Path, with_weights: bool) -> None:
    """Dequantise a GGUF file to bfloat16 safetensors, and rebuild config and tokenizer.

    Args:
        path: the .gguf file.
        out_dir: gets the files that save_pretrained writes.
        with_weights: otherwise config and tokenizer alone.

    Raises:
        ValueError: if the packages for it are not installed.
    """
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
    """Let transformers read a GGUF file once instead of three times, and make the table of names once.

    For a vocabulary of 49k these repetitions take most of the conversion.
    """
    import gguf
    import numpy as np

    class Reader(gguf.GGUFReader):  # type: ignore[misc]
        def __setattr__(self, name: str, value: Any) -> None:
            # Slices of a memmap cost five times those of a plain array on the same memory.
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
