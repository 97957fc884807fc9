"""A random draft and its vocabulary on disk, as training leaves them, and its export."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from eagle3.config.training import ExportConfig
from eagle3.export import write_export
from eagle3.vocab import Vocab, save_vocab
from tests.helpers.factories import draft_mapping, draft_tensors


def write_draft(root: Path, config: dict[str, Any], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Write `draft` and `vocab.safetensors` under `root`; returns the draft's tensors."""
    tensors = {name: t.to(dtype) for name, t in draft_tensors(config).items()}
    (root / "draft").mkdir()
    (root / "draft" / "draft.json").write_text(json.dumps(config))
    save_file(tensors, root / "draft" / "draft.safetensors")
    mapping = draft_mapping(config["transformer_layer_config"]["vocab_size"], config["draft_vocab_size"])
    save_vocab(root / "vocab.safetensors", Vocab(mapping["d2t"], mapping["t2d"], mapping["t2d"].long()))
    return tensors


def write_exported(root: Path, config: dict[str, Any], k: int) -> Path:
    """Write a draft for the target in `target`; returns the directory of its export in float32."""
    write_draft(root, config)
    cfg = ExportConfig(num_speculative_tokens=k, dtype="float32")
    write_export(
        root / "draft", root / "vocab.safetensors", root / "target", "example-org/tiny", cfg, root / "export"
    )
    return root / "export"
