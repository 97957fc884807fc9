"""Whole training runs on a tiny target: resume bit for bit, the best is kept, bad states named, the draft
learns.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from eagle3.config.training import ExportConfig, TrainConfig
from eagle3.export import write_export
from eagle3.shards.tokens import TokenRow
from eagle3.training.launch import Preempted
from eagle3.training.loop import train
from eagle3.training.metrics import read_metrics
from eagle3.training.step import PART_TOKENS, Objective
from eagle3.vocab import build_vocab, save_vocab
from tests.helpers.jobs import make_inputs, make_job, upload
from tests.helpers.shard_files import write_hidden_states
from tests.helpers.tiny_draft import tiny_target


def stop_after(count: int) -> Any:
    return lambda step: step == count


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("stop", [3, 5])
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(
    tmp_path: Path, optimizer: str, stop: int
) -> None:
    inputs = make_inputs(tmp_path)
    whole, parts = (
        make_job(inputs, tmp_path / name, optimizer=optimizer, packs_per_step=2, epochs=4)
        for name in ("whole", "parts")
    )
    train(whole)
    with pytest.raises(Preempted, match=f"stopped after {stop} of"):
        train(parts, should_stop=stop_after(stop))
    assert not (tmp_path / "parts" / "draft.safetensors").exists()
    train(parts)
    assert_same_weights(tmp_path / "whole", tmp_path / "parts")
    steps = [[m["step"] for m in read_metrics(tmp_path / d / "metrics.jsonl")] for d in ("whole", "parts")]
    assert steps[0] == steps[1] == list(range(1, len(steps[0]) + 1))
    assert len(steps[0]) > stop + 4


def assert_same_weights(a: Path, b: Path) -> None:
    whole, parts = (load_file(d / "draft.safetensors") for d in (a, b))
    assert whole.keys() == parts.keys()
    for name, tensor in whole.items():
        assert torch.equal(tensor, parts[name]), name


def test_a_checkpoint_of_other_settings_is_refused(tmp_path: Path) -> None:
    inputs = make_inputs(tmp_path)
    with pytest.raises(Preempted):
        train(make_job(inputs, tmp_path / "run"), should_stop=stop_after(2))
    with pytest.raises(ValueError, match="checkpoint.safetensors belongs to other data or settings"):
        train(make_job(inputs, tmp_path / "run", learning_rate=2e-2))


def test_settings_that_change_nothing_learnt_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    inputs = make_inputs(tmp_path)
    with pytest.raises(Preempted):
        train(make_job(inputs, tmp_path / "run"), should_stop=stop_after(2))
    train(make_job(inputs, tmp_path / "run", checkpoint_every=7, processes=1, disk_budget_bytes=1 << 30))
    train(make_job(inputs, tmp_path / "whole"))
    assert_same_weights(tmp_path / "whole", tmp_path / "run")


def test_a_cut_checkpoint_is_named(tmp_path: Path) -> None:
    inputs = make_inputs(tmp_path)
    with pytest.raises(Preempted):
        train(make_job(inputs, tmp_path / "run"), should_stop=stop_after(2))
    path = tmp_path / "run" / "checkpoint.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="checkpoint.safetensors is not a complete checkpoint"):
        train(make_job(inputs, tmp_path / "run"))


def test_a_checkpoint_goes_on_in_another_directory(tmp_path: Path) -> None:
    """All that is needed is in the file: a new pod has nothing else."""
    inputs = make_inputs(tmp_path)
    train(make_job(inputs, tmp_path / "whole"))
    with pytest.raises(Preempted):
        train(make_job(inputs, tmp_path / "first"), should_stop=stop_after(5))
    (tmp_path / "second").mkdir()
    (tmp_path / "first" / "checkpoint.safetensors").rename(tmp_path / "second" / "checkpoint.safetensors")
    train(make_job(inputs, tmp_path / "second"))
    assert_same_weights(tmp_path / "whole", tmp_path / "second")
    lines = [[m["loss"] for m in read_metrics(tmp_path / d / "metrics.jsonl")] for d in ("whole", "second")]
    assert lines[0] == lines[1]


def test_frozen_tensors_are_not_in_the_checkpoint(tmp_path: Path) -> None:
    inputs = make_inputs(tmp_path)
    train(make_job(inputs, tmp_path / "run", head="target_frozen"))
    with safe_open(tmp_path / "run" / "checkpoint.safetensors", framework="pt") as f:
        assert not [key for key in f.keys() if "lm_head" in key or "embed" in key]  # noqa: SIM118


@pytest.mark.parametrize(("model_type", "loss"), [("llama", "lk_hybrid"), ("qwen3", "kl")])
def test_the_draft_learns_and_reports(tmp_path: Path, model_type: str, loss: str) -> None:
    inputs = make_inputs(tmp_path, model_type)
    train(make_job(inputs, tmp_path / "run", epochs=20, loss=loss, averaging="conversation"))
    metrics = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert metrics[-1]["loss"] < metrics[0]["loss"] / 2
    assert min(metrics[-1]["accuracy_by_step"]) > 0.9
    assert 1 <= metrics[-1]["validation_acceptance_length"] <= 4
    assert 0 < metrics[-1]["validation_coverage"] < 1
    assert len(metrics[-1]["loss_by_step"]) == len(metrics[-1]["accuracy_by_step"]) == 3
    assert metrics[-1]["seconds_left"] == 0
    assert metrics[-1]["memory_bytes"] > 0
    assert 0 <= metrics[-1]["data_wait_share"] <= 1
    assert metrics[-1]["acceptance_length"] > 1
    for line in metrics:
        assert {
            "learning_rate",
            "gradient_norm",
            "label_coverage",
            "supervised",
            "tokens",
            "cpu_s",
        } <= line.keys()


def test_the_weights_of_the_best_validation_are_handed_on(tmp_path: Path) -> None:
    inputs = make_inputs(tmp_path)
    settings = {"validate_every": 2, "epochs": 4, "learning_rate": 5e-2}
    for keep in ("best", "last"):
        train(make_job(inputs, tmp_path / keep, keep=keep, **settings))
    metrics = read_metrics(tmp_path / "last" / "metrics.jsonl")
    lengths = {
        m["step"]: m["validation_acceptance_length"] for m in metrics if "validation_acceptance_length" in m
    }
    best = max(lengths, key=lambda step: (lengths[step], step))
    assert len(lengths) > 3
    assert best < max(lengths), "the last step is the best one: choose settings under which it is not"
    with pytest.raises(Preempted):
        train(make_job(inputs, tmp_path / "stopped", keep="last", **settings), should_stop=stop_after(best))
    at_best = load_file(tmp_path / "stopped" / "checkpoint.safetensors")
    kept, last = (load_file(tmp_path / keep / "draft.safetensors") for keep in ("best", "last"))
    assert all(torch.equal(tensor, at_best[f"draft/{name}"]) for name, tensor in kept.items())
    assert not torch.equal(kept["fc.weight"], last["fc.weight"])


def test_a_frozen_head_stays_the_targets(tmp_path: Path) -> None:
    inputs = make_inputs(tmp_path)
    train(make_job(inputs, tmp_path / "run", head="target_frozen"))
    draft = load_file(tmp_path / "run" / "draft.safetensors")
    vocab = load_file(tmp_path / "vocab.safetensors")
    ids = torch.arange(80) + vocab["d2t"]
    assert torch.equal(draft["lm_head.weight"], tiny_target(dtype=torch.float32).head[ids])


def test_packs_of_a_step_weigh_by_their_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One large pack, small packs in one step, and one large pack worked on in parts are the same step."""
    inputs = make_inputs(tmp_path)
    settings = {"epochs": 1, "validation_rows": 0, "optimizer": "adamw"}
    train(make_job(inputs, tmp_path / "large", pack_tokens=100_000, **settings))
    train(make_job(inputs, tmp_path / "small", pack_tokens=64, packs_per_step=1000, **settings))
    monkeypatch.setitem(PART_TOKENS, "cpu", 50)
    train(make_job(inputs, tmp_path / "parts", pack_tokens=100_000, **settings))
    large, *others = (read_metrics(tmp_path / d / "metrics.jsonl") for d in ("large", "small", "parts"))
    for other in others:
        assert len(large) == len(other) == 1
        for name in (
            "loss",
            "gradient_norm",
            "supervised",
            "tokens",
            "loss_by_step",
            "accuracy_by_step",
            "acceptance_length",
        ):
            assert large[0][name] == pytest.approx(other[0][name], rel=1e-5), name


def test_bfloat16_computes_from_float32_master_weights(tmp_path: Path) -> None:
    inputs = make_inputs(tmp_path)
    for dtype in ("float32", "bfloat16"):
        train(make_job(inputs, tmp_path / dtype, dtype=dtype, epochs=1))
    exact, rough = (read_metrics(tmp_path / d / "metrics.jsonl") for d in ("float32", "bfloat16"))
    assert rough[0]["loss"] == pytest.approx(exact[0]["loss"], rel=0.05)
    assert rough[0]["loss"] != exact[0]["loss"]
    assert load_file(tmp_path / "bfloat16" / "draft.safetensors")["fc.weight"].dtype == torch.float32


def test_a_non_finite_loss_names_the_conversations_and_spares_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = make_inputs(tmp_path)
    with pytest.raises(Preempted):
        train(make_job(inputs, tmp_path / "run"), should_stop=stop_after(2))
    before = (tmp_path / "run" / "checkpoint.safetensors").read_bytes()
    sound = Objective.states
    monkeypatch.setattr(Objective, "states", lambda *args: sound(*args) * torch.inf)
    with pytest.raises(FloatingPointError, match=r"step 3: loss nan.*row-[01]-"):
        train(make_job(inputs, tmp_path / "run"))
    assert (tmp_path / "run" / "checkpoint.safetensors").read_bytes() == before


def test_training_from_s3_within_a_disk_budget_equals_training_from_the_disk(tmp_path: Path, s3: Any) -> None:
    """The budget holds less than half of the data; the rows and their order are the same, so the weights are,
    bit for bit.
    """
    inputs = make_inputs(tmp_path)
    data_bytes = sum(f.stat().st_size for d in inputs["shard_dirs"] for f in Path(d).glob("chunk-*"))
    settings = {"shuffle_chunks": 2, "disk_budget_bytes": data_bytes // 2}
    train(make_job(inputs, tmp_path / "disk", **settings))
    train(make_job(inputs | {"shard_dirs": upload(s3, inputs["shard_dirs"])}, tmp_path / "s3", **settings))
    assert_same_weights(tmp_path / "disk", tmp_path / "s3")
    assert not list((tmp_path / "s3").glob("chunks-*"))


def test_an_unfinished_shard_is_named(tmp_path: Path) -> None:
    inputs = make_inputs(tmp_path)
    with pytest.raises(ValueError, match=r"manifest.json is missing"):
        train(make_job(inputs | {"shard_dirs": [str(tmp_path / "nowhere")]}, tmp_path / "run"))


def test_step_weights_fall_only_beyond_three_steps() -> None:
    assert TrainConfig(ttt_steps=3).step_weights == [1.0, 1.0, 1.0]
    assert TrainConfig(ttt_steps=5).step_weights == pytest.approx([1.0, 0.8, 0.64, 0.512, 0.4096])
    assert TrainConfig(ttt_steps=2, step_decay=0.5).step_weights == [1.0, 0.5]


def test_of_equal_validations_the_latest_is_kept(tmp_path: Path) -> None:
    """Weights that have learnt too little for any acceptance: those of the first epoch are no better."""
    inputs, settings = make_inputs(tmp_path), {"learning_rate": 1e-6, "validation_rows": 1}
    for keep in ("best", "last"):
        train(make_job(inputs, tmp_path / keep, keep=keep, **settings))
    lengths = [
        m.get("validation_acceptance_length", 1.0) for m in read_metrics(tmp_path / "last" / "metrics.jsonl")
    ]
    assert set(lengths) == {1.0}
    assert_same_weights(tmp_path / "best", tmp_path / "last")


def test_inputs_that_do_not_fit_are_named(tmp_path: Path) -> None:
    inputs = make_inputs(tmp_path)
    with pytest.raises(
        ValueError, match=r"the shards hold aux layers \[1, 3, 4\], the job wants \[1, 2, 4\]"
    ):
        train(make_job(inputs | {"layer_ids": [1, 2, 4]}, tmp_path / "run"))
    save_vocab(tmp_path / "other", build_vocab(torch.ones(50, dtype=torch.int64), 20, []))
    with pytest.raises(ValueError, match=r"other is for a target of 50 tokens, .*target has 97"):
        train(make_job(inputs | {"vocab_path": str(tmp_path / "other")}, tmp_path / "run"))
    with pytest.raises(
        ValueError, match=r"no row has two adjacent supervised tokens within train.pack_tokens 2"
    ):
        train(make_job(inputs, tmp_path / "run", pack_tokens=2))


def test_states_of_another_target_are_refused(tmp_path: Path) -> None:
    inputs = make_inputs(tmp_path)
    rows = [TokenRow(f"row-{r}", "test", [1, 2, 3, 4], [False, True, True, True]) for r in range(12)]
    write_hidden_states(tmp_path / "wide", rows, [torch.ones(4, 4, 96)] * 12, 4096, {})
    with pytest.raises(
        ValueError, match=r"states of \(3, 96\) .* do not fit a draft of \(3, 48\) and 97 tokens"
    ):
        train(make_job(inputs | {"shard_dirs": [str(tmp_path / "wide")]}, tmp_path / "run"))


def test_an_initial_draft_that_training_only_spoils_is_handed_on(tmp_path: Path) -> None:
    inputs = make_inputs(tmp_path)
    train(make_job(inputs, tmp_path / "first", epochs=20))
    assert (
        max(
            m.get("validation_acceptance_length", 1)
            for m in read_metrics(tmp_path / "first" / "metrics.jsonl")
        )
        > 1
    )
    initial = export_of(tmp_path)
    job = make_job(
        inputs | {"init_dir": str(initial)},
        tmp_path / "second",
        epochs=1,
        learning_rate=1.0,
        schedule="constant",
    )
    train(job)
    assert_same_weights(tmp_path / "first", tmp_path / "second")
    assert read_metrics(tmp_path / "second" / "metrics.jsonl")[-1]["validation_acceptance_length"] == 1.0


def export_of(root: Path) -> Path:
    """The export of root/first."""
    cfg = ExportConfig(dtype="float32")
    write_export(
        root / "first", root / "vocab.safetensors", root / "target", "example-org/tiny", cfg, root / "export"
    )
    return root / "export"
