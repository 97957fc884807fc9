"""Whole training runs on a tiny target written to disk: resume bit for bit, bad states named, the draft learns."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3.batch import PackedBatch
from eagle3.config import TrainConfig
from eagle3.draft.model import Eagle3Draft
from eagle3.draft.ttt import unroll
from eagle3.shards import HiddenStateWriter, TokenRow
from eagle3.training.loop import train
from eagle3.training.metrics import read_metrics
from eagle3.vocab import build_vocab, count_tokens, save_vocab
from tests.draft.tiny import LAYER_IDS, VOCAB, target_config, tiny_target

SETTINGS = {"epochs": 2, "pack_tokens": 64, "validation_rows": 3, "checkpoint_every": 3, "learning_rate": 1e-2}


def make_inputs(root: Path, model_type: str = "llama") -> dict:
    """Two shards of random conversations whose last states all point at the next token, a vocabulary, and a target directory."""
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
        writer = HiddenStateWriter(root / f"shard{shard}", "float32", 4096, {"layer_ids": LAYER_IDS})
        for r in range(15):
            length = int(torch.randint(4, 24, (1,), generator=g))
            start, stride = torch.randint(VOCAB, (2,), generator=g).tolist()
            ids = [(start + stride % 5 * t) % VOCAB for t in range(length)]
            row = TokenRow(f"row-{shard}-{r}", "test", ids, [t >= 2 for t in range(length)])
            states = target.embedding[[*ids[1:], ids[-1]]][:, None].repeat(1, len(LAYER_IDS) + 1, 1)
            writer.add(row, states + 0.01 * torch.randn(states.shape, generator=g))
            rows.append(row)
        writer.close()
        dirs.append(str(root / f"shard{shard}"))
    save_vocab(root / "vocab.safetensors", build_vocab(count_tokens(rows, VOCAB), 80, []))
    return {
        "shard_dirs": dirs,
        "vocab_path": str(root / "vocab.safetensors"),
        "target_dir": str(root / "target"),
        "layer_ids": LAYER_IDS,
    }


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("stop", [3, 5])
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(tmp_path: Path, optimizer: str, stop: int) -> None:
    inputs, cfg = make_inputs(tmp_path), TrainConfig(optimizer=optimizer, **SETTINGS)
    train(**inputs, cfg=cfg, out_dir=str(tmp_path / "whole"))
    train(**inputs, cfg=cfg, out_dir=str(tmp_path / "parts"), stop_after=stop)
    assert not (tmp_path / "parts" / "draft.safetensors").exists()
    train(**inputs, cfg=cfg, out_dir=str(tmp_path / "parts"))
    whole, parts = (load_file(tmp_path / d / "draft.safetensors") for d in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    for name, tensor in whole.items():
        assert torch.equal(tensor, parts[name]), name
    steps = [[m["step"] for m in read_metrics(tmp_path / d / "metrics.jsonl")] for d in ("whole", "parts")]
    assert steps[0] == steps[1] == list(range(1, len(steps[0]) + 1))
    assert len(steps[0]) > stop + 2


def test_a_checkpoint_of_other_settings_is_refused(tmp_path: Path) -> None:
    inputs = make_inputs(tmp_path)
    train(**inputs, cfg=TrainConfig(**SETTINGS), out_dir=str(tmp_path / "run"), stop_after=2)
    with pytest.raises(ValueError, match="checkpoint.safetensors belongs to other data or settings"):
        train(**inputs, cfg=TrainConfig(**SETTINGS | {"learning_rate": 2e-2}), out_dir=str(tmp_path / "run"))


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_the_draft_learns_and_reports(tmp_path: Path, model_type: str) -> None:
    inputs = make_inputs(tmp_path, model_type)
    train(**inputs, cfg=TrainConfig(**SETTINGS | {"epochs": 20}), out_dir=str(tmp_path / "run"))
    metrics = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert metrics[-1]["loss"] < metrics[0]["loss"] / 2
    assert min(metrics[-1]["accuracy_by_step"]) > 0.9
    assert 1 <= metrics[-1]["validation_acceptance_length"] <= 4
    assert len(metrics[-1]["loss_by_step"]) == len(metrics[-1]["accuracy_by_step"]) == 3
    assert metrics[-1]["seconds_left"] == 0


def test_a_frozen_head_stays_the_targets(tmp_path: Path) -> None:
    inputs = make_inputs(tmp_path)
    train(**inputs, cfg=TrainConfig(**SETTINGS, head="target_frozen"), out_dir=str(tmp_path / "run"))
    draft = load_file(tmp_path / "run" / "draft.safetensors")
    vocab = load_file(tmp_path / "vocab.safetensors")
    ids = torch.arange(80) + vocab["d2t"]
    assert torch.equal(draft["lm_head.weight"], tiny_target(dtype=torch.float32).head[ids])


def test_a_non_finite_loss_names_the_conversations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs(tmp_path)

    def broken(draft: Eagle3Draft, batch: PackedBatch) -> Tensor:
        return unroll(draft, batch) * torch.inf

    monkeypatch.setattr("eagle3.training.loop.unroll", broken)
    with pytest.raises(FloatingPointError, match="row-[01]-"):
        train(**inputs, cfg=TrainConfig(**SETTINGS), out_dir=str(tmp_path / "run"))


def test_an_unfinished_shard_is_named(tmp_path: Path) -> None:
    inputs = make_inputs(tmp_path)
    with pytest.raises(ValueError, match="manifest.json is missing"):
        train(**inputs | {"shard_dirs": [str(tmp_path / "nowhere")]}, cfg=TrainConfig(**SETTINGS), out_dir=str(tmp_path / "run"))
