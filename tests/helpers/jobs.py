"""A tiny target, shards and vocabulary on disk or in S3, and jobs that train on them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from eagle3.config.training import TrainConfig
from eagle3.shards.tokens import TokenRow
from eagle3.training.launch import TrainJob
from eagle3.vocab import build_vocab, count_tokens, save_vocab
from tests.helpers.shard_files import write_hidden_states
from tests.helpers.tiny_draft import LAYER_IDS, VOCAB, target_config, tiny_target

SETTINGS: dict[str, Any] = {
    "epochs": 2,
    "pack_tokens": 64,
    "validation_rows": 3,
    "checkpoint_every": 3,
    "learning_rate": 1e-2,
    "device": "cpu",
}


def make_inputs(root: Path, model_type: str = "llama") -> dict[str, Any]:
    """Two shards of random conversations whose last states all point at the next token, a vocabulary, and a
    target directory.
    """
    target = tiny_target(model_type, torch.float32)
    (root / "target").mkdir()
    (root / "target" / "config.json").write_text(json.dumps(target_config(model_type)))
    save_file(
        {"model.embed_tokens.weight": target.embedding, "model.norm.weight": target.norm_weight},
        root / "target" / "model.safetensors",
    )
    g = torch.Generator().manual_seed(0)
    rows, dirs = [], []
    for shard in range(2):
        shard_rows, shard_states = [], []
        for r in range(15):
            length = int(torch.randint(4, 24, (1,), generator=g))
            start, stride = torch.randint(VOCAB, (2,), generator=g).tolist()
            ids = [(start + stride % 5 * t) % VOCAB for t in range(length)]
            row = TokenRow(f"row-{shard}-{r}", "test", ids, [t >= 2 for t in range(length)])
            states = target.embedding[[*ids[1:], ids[-1]]][:, None].repeat(1, len(LAYER_IDS) + 1, 1)
            shard_rows.append(row)
            shard_states.append(states + 0.01 * torch.randn(states.shape, generator=g))
        write_hidden_states(root / f"shard{shard}", shard_rows, shard_states, 4096, {"layer_ids": LAYER_IDS})
        rows += shard_rows
        dirs.append(str(root / f"shard{shard}"))
    save_vocab(root / "vocab.safetensors", build_vocab(count_tokens(rows, VOCAB), 80, []))
    return {
        "shard_dirs": dirs,
        "vocab_path": str(root / "vocab.safetensors"),
        "target_dir": str(root / "target"),
        "layer_ids": LAYER_IDS,
    }


def make_job(inputs: dict[str, Any], out_dir: Path, **settings: Any) -> TrainJob:
    """A job with SETTINGS, changed by `settings`."""
    return TrainJob(**inputs, out_dir=str(out_dir), cfg=TrainConfig(**SETTINGS | settings))


def upload(store: Any, dirs: list[str]) -> list[str]:
    for d in dirs:
        store.put(d, f"states/{Path(d).name}", recursive=True)
    return [f"s3://states/{Path(d).name}" for d in dirs]
