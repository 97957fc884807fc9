"""Plans: bytes and hours by the stated formulas."""

import re
from dataclasses import asdict, replace
from typing import Any

import pytest

from eagle3.config.resources import quantity_bytes
from eagle3.planning import estimates
from eagle3.planning.accelerators import ACCELERATORS
from eagle3.planning.plan import RunPlan, make_plan, render_text
from eagle3.planning.workload import Workload
from eagle3.shards.hidden_states import hidden_state_bytes
from eagle3.targets.size import target_size
from tests.helpers.configs import GPT_OSS_20B, LLAMA31_8B, QWEN3_30B_A3B
from tests.helpers.plans import GIB, SOURCES, WORK, settings


def plan(config: dict[str, Any] = LLAMA31_8B, work: Workload = WORK, **blocks: dict[str, Any]) -> RunPlan:
    cfg = settings(**blocks)
    return make_plan(cfg, config, "org/target", SOURCES, 24, work)


@pytest.mark.parametrize("config", [LLAMA31_8B, QWEN3_30B_A3B, GPT_OSS_20B], ids=lambda c: c["model_type"])
def test_supported_targets_are_planned_and_shown(config: dict[str, Any]) -> None:
    made = plan(config)
    text = render_text(made)
    for part in ("org/target", "1,000 in 4 shards", "estimates, not measurements", "assumed:"):
        assert part in text
    assert [s.stage for s in made.stages] == ["regenerate", "extract", "train", "evaluate"]
    assert all(s.gpu_hours > 0 and s.hours > 0 for s in made.stages)
    assert made.to_dict()["assumptions"]


def test_bytes_of_states_follow_the_format_and_the_measured_compression() -> None:
    made = plan()
    assert made.max_state_bytes == hidden_state_bytes(900_000, 800_000, 3, 4096, "bf16")
    assert made.state_bytes == round(0.73 * hidden_state_bytes(500_000, 400_000, 3, 4096, "bf16"))
    bare = plan(extract={"compression": "none", "encoding": "fp8", "layer_ids": [5]})
    assert bare.state_bytes == hidden_state_bytes(500_000, 400_000, 1, 4096, "fp8")


def hours(made: RunPlan, stage: str) -> float:
    return next(s.gpu_hours for s in made.stages if s.stage == stage)


def test_hours_follow_the_stated_formulas() -> None:
    made, size, gpu = plan(extract={"compression": "none"}), target_size(LLAMA31_8B), ACCELERATORS["H200"]
    starts = 4 * estimates.ENGINE_START_S
    reading = size.prefill_flops(1000, 500_000) / (gpu.tflops * 1e12 * 0.4)
    assert hours(made, "extract") == pytest.approx((reading + starts) / 3600)
    draft = estimates.draft_size(LLAMA31_8B, settings())
    flops = 6 * (500_000 * draft.per_token + 400_000 * 3 * draft.per_pair) + 2 * 400_000 * draft.head
    assert hours(made, "train") == pytest.approx(flops / (gpu.tflops * 1e12 * 0.3) / 3600)
    context = (100_000 + 200_000) / 1000
    step = (size.weight_bytes("bfloat16") + 128 * context * size.key_value_bytes("bfloat16")) / (
        gpu.bandwidth_gb_s * 1e9 * 0.6
    )
    writing = size.prefill_flops(1000, 100_000) / (gpu.tflops * 1e12 * 0.4) + 400_000 / 128 * step
    assert hours(made, "regenerate") == pytest.approx((writing + starts) / 3600)


def test_more_gpus_save_hours_but_no_gpu_hours() -> None:
    one, four = (
        plan(train={"packs_per_step": 4}),
        plan(train={"packs_per_step": 4}, resources={"trainer": {"gpus": 4}}),
    )
    assert four.stages[2].hours == pytest.approx(one.stages[2].hours / 4)
    assert hours(four, "train") == pytest.approx(hours(one, "train"))
    wide, narrow = plan(fanout={"replicas": 4}), plan(fanout={"replicas": 1})
    assert wide.stages[0].hours == pytest.approx(narrow.stages[0].hours / 4)
    assert wide.stages[0].gpu_hours == narrow.stages[0].gpu_hours
    assert hours(plan(resources={"engine": {"accelerator": "A100_80GB"}}), "extract") >= hours(
        plan(), "extract"
    )


def test_zstd_limits_the_speed_if_it_is_slower_than_the_gpu() -> None:
    work = replace(
        WORK, rows=200_000, tokens=100_000_000, supervised=80_000_000, max_tokens=10**8, max_supervised=10**8
    )
    packed, bare = (
        plan(GPT_OSS_20B, work, extract={"compression": c, "encoding": "fp32"}).stages[1]
        for c in ("zstd", "none")
    )
    assert packed.gpu_hours > bare.gpu_hours
    assert "by packing" in packed.how
    assert "by reading" in bare.how


def test_without_regeneration_no_answers_are_written() -> None:
    work = replace(WORK, waiting_rows=0, prompt_tokens=0, new_tokens=0)
    assert [s.stage for s in plan(work=work, regenerate={"enabled": False}).stages] == [
        "extract",
        "train",
        "evaluate",
    ]


@pytest.mark.parametrize(
    ("quantity", "size"),
    [("1Ki", 1024), ("400Gi", 400 * GIB), ("1.5Ti", 3 << 39), ("2G", 2 * 10**9), ("7", 7), ("1500m", 1)],
)
def test_quantities_are_bytes(quantity: str, size: int) -> None:
    assert quantity_bytes(quantity) == size


def test_a_note_names_shards_too_small_for_an_engine_start_and_the_size_that_is_enough() -> None:
    small = plan(data={"rows_per_shard": 250})
    message = next(note for note in small.notes if note.startswith("extract: starting the engine takes"))
    found = re.search(r"rows_per_shard of ([\d,]+) it would be 10%", message)
    assert found
    enough = int(found[1].replace(",", ""))
    times = enough // 250 + 1
    work = Workload(**{name: n * times if name != "shards" else n for name, n in asdict(WORK).items()})
    assert not any(
        note.startswith("extract: starting")
        for note in plan(work=work, data={"rows_per_shard": enough}).notes
    )
    almost = Workload(
        **{name: int(n * times * 0.8) if name != "shards" else n for name, n in asdict(WORK).items()}
    )
    assert any(
        note.startswith("extract: starting")
        for note in plan(work=almost, data={"rows_per_shard": enough}).notes
    )


def test_a_sampled_source_that_loses_many_rows_is_noted() -> None:
    cfg = settings()
    sampled = replace(SOURCES[0], basis="estimated", dropped_share=0.6)
    notes = make_plan(cfg, LLAMA31_8B, "org/target", [sampled], 24, WORK).notes
    assert any(
        note.startswith("train: 60% of the first rows cannot be used; prepare fails if") for note in notes
    )
