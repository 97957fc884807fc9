"""Plans: bytes and hours by the stated formulas, and refusals in the words of the stages that would refuse."""

import re
from dataclasses import asdict, replace
from typing import Any

import pytest

from eagle3.config.data import DataConfig, VocabConfig
from eagle3.config.engine import EngineConfig, EvaluateConfig, ExtractConfig, FanOutConfig, RegenerateConfig
from eagle3.config.resources import ResourcesConfig, quantity_bytes
from eagle3.config.training import ExportConfig, TrainConfig
from eagle3.planning import estimates
from eagle3.planning.accelerators import ACCELERATORS
from eagle3.planning.estimates import Workload
from eagle3.planning.plan import (
    PodDisks,
    RunPlan,
    RunSettings,
    check_settings,
    draft_of,
    make_plan,
    render_text,
)
from eagle3.planning.survey import SourceSurvey
from eagle3.shards.hidden_states import hidden_state_bytes
from eagle3.targets.size import target_size
from tests.helpers.configs import GPT_OSS_20B, LLAMA31_8B, QWEN3_30B_A3B

GIB = 1 << 30
DISKS = PodDisks(200 * GIB, 400 * GIB, 400 * GIB)
WORK = Workload(
    rows=1000,
    shards=4,
    waiting_rows=1000,
    prompt_tokens=100_000,
    new_tokens=400_000,
    tokens=500_000,
    supervised=400_000,
    max_tokens=900_000,
    max_supervised=800_000,
)
SOURCES = [SourceSurvey("train", "counted", 1000, 100_000, 0, 1000, 0, 0.0)]


def settings(**blocks: dict[str, Any]) -> RunSettings:
    kinds = (
        EngineConfig,
        DataConfig,
        RegenerateConfig,
        VocabConfig,
        ExtractConfig,
        TrainConfig,
        ExportConfig,
        EvaluateConfig,
    )
    names = (
        "engine",
        "data",
        "regenerate",
        "vocab",
        "extract",
        "train",
        "export",
        "evaluate",
        "fanout",
        "resources",
    )
    defaults: dict[str, dict[str, Any]] = {"evaluate": {"dtype": "bfloat16"}}
    made = {
        name: kind(**(defaults.get(name, {}) | blocks.get(name, {})))
        for name, kind in zip(names, (*kinds, FanOutConfig, ResourcesConfig), strict=True)
    }
    return RunSettings(**made)


def plan(config: dict[str, Any] = LLAMA31_8B, work: Workload = WORK, **blocks: dict[str, Any]) -> RunPlan:
    cfg = settings(**blocks)
    check_settings(cfg, config, "org/target", DISKS)
    return make_plan(cfg, config, "org/target", SOURCES, 24, work)


@pytest.mark.parametrize("config", [LLAMA31_8B, QWEN3_30B_A3B, GPT_OSS_20B], ids=lambda c: c["model_type"])
def test_supported_targets_are_planned_and_shown(config: dict[str, Any]) -> None:
    made = plan(config)
    text = render_text(made)
    for said in ("org/target", "1,000 in 4 shards", "estimates, not measurements", "assumed:"):
        assert said in text
    assert [s.stage for s in made.stages] == ["regenerate", "extract", "train", "evaluate"]
    assert all(s.gpu_hours > 0 and s.hours > 0 for s in made.stages)
    assert made.to_dict()["assumptions"]


def test_bytes_of_states_are_the_formats_own_with_the_measured_compression() -> None:
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
    draft = draft_of(LLAMA31_8B, settings())
    flops = 6 * (500_000 * draft.per_token + 400_000 * 3 * draft.per_pair) + 2 * 400_000 * draft.head
    assert hours(made, "train") == pytest.approx(flops / (gpu.tflops * 1e12 * 0.3) / 3600)
    context = (100_000 + 200_000) / 1000
    step = (size.weight_bytes("bfloat16") + 128 * context * size.key_value_bytes("bfloat16")) / (
        gpu.bandwidth_gb_s * 1e9 * 0.6
    )
    writing = size.prefill_flops(1000, 100_000) / (gpu.tflops * 1e12 * 0.4) + 400_000 / 128 * step
    assert hours(made, "regenerate") == pytest.approx((writing + starts) / 3600)


def test_more_gpus_save_time_and_cost_none_of_it_twice() -> None:
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


def test_zstd_sets_the_pace_where_it_is_slower_than_the_gpu() -> None:
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


REFUSALS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"model_type": "gemma2"}, {}, "org/target is a 'gemma2' model"),
    ({}, {"data": {"max_prompt_tokens": 4000}}, "must not exceed engine.max_model_len"),
    ({"max_position_embeddings": 2048}, {}, "must not exceed the target's 2048 positions"),
    ({}, {"extract": {"layer_ids": [33]}}, "extract.layer_ids must lie in 0 … 32"),
    (
        {},
        {"vocab": {"size": 200_000}},
        "draft vocab must not exceed the target's 128256, got 200000; lower vocab.size",
    ),
    ({}, {"fanout": {"tensor_parallel_size": 3}}, "divisible by fanout.tensor_parallel_size, got 3"),
    (
        {},
        {"resources": {"engine": {"accelerator": "T4"}}},
        "must fit into 1 x 14 GB.*raise fanout.tensor_parallel_size",
    ),
    (
        {},
        {"engine": {"dtype": "float32"}, "resources": {"engine": {"accelerator": "L4"}}},
        "weights in float32",
    ),
    (
        {},
        {"evaluate": {"dtype": "float32"}, "resources": {"engine": {"accelerator": "L4"}}},
        "for the evaluation: set evaluate.dtype to bfloat16, raise fanout.tensor_parallel_size",
    ),
    (
        {},
        {"resources": {"trainer": {"gpus": 2}}},
        "packs_per_step must be a multiple of resources.trainer.gpus 2, got 1",
    ),
    (
        {"intermediate_size": 28672},
        {"vocab": {"size": 128_256}, "resources": {"trainer": {"accelerator": "T4"}}},
        "must fit on one T4 of 16 GB, they take",
    ),
    (
        {},
        {"resources": {"data": {"ephemeral_storage": "10Gi"}}},
        "resources.data.ephemeral_storage must hold 16 GB",
    ),
    (
        {},
        {"train": {"disk_budget_bytes": 10**12}},
        "resources.trainer.ephemeral_storage .* or lower train.disk_budget_bytes",
    ),
    (
        {},
        {"train": {"disk_budget_bytes": 10**9}},
        "lower train.shuffle_chunks or raise train.disk_budget_bytes",
    ),
    ({}, {"data": {"min_shards": 5}}, "1000 usable rows fill 4 shards .* data.min_shards = 5"),
]


@pytest.mark.parametrize(("changes", "blocks", "said"), REFUSALS, ids=[said[:40] for *_, said in REFUSALS])
def test_what_a_stage_would_refuse_is_refused(
    changes: dict[str, Any], blocks: dict[str, Any], said: str
) -> None:
    asked = ResourcesConfig(**blocks.get("resources", {}))
    disks = (
        replace(DISKS, data=quantity_bytes(asked.data.ephemeral_storage))
        if asked.data.ephemeral_storage
        else DISKS
    )
    cfg, config = settings(**blocks), LLAMA31_8B | changes

    def plan_it() -> None:
        check_settings(cfg, config, "org/target", disks)
        make_plan(cfg, config, "org/target", SOURCES, 24, WORK)

    with pytest.raises(ValueError, match=said):
        plan_it()


def test_an_initial_drafts_vocabulary_goes_before_the_setting() -> None:
    check_settings(settings(vocab={"size": 200_000}), LLAMA31_8B, "org/target", DISKS, is_vocab_given=True)


def test_a_target_too_large_for_one_gpu_fits_on_two() -> None:
    wide = LLAMA31_8B | {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    }
    disks = PodDisks(1000 * GIB, 1000 * GIB, 1000 * GIB)
    check_settings(settings(fanout={"tensor_parallel_size": 2}), wide, "org/target", disks)
    with pytest.raises(ValueError, match=r"2 x 127 GB .* for the evaluation: set evaluate.dtype"):
        check_settings(
            settings(fanout={"tensor_parallel_size": 2}, evaluate={"dtype": "float32"}),
            wide,
            "org/target",
            disks,
        )
    with pytest.raises(ValueError, match=r"1 x 127 GB of GPU memory, they take 141 \+"):
        check_settings(settings(), wide, "org/target", disks)


@pytest.mark.parametrize(
    ("quantity", "size"),
    [("1Ki", 1024), ("400Gi", 400 * GIB), ("1.5Ti", 3 << 39), ("2G", 2 * 10**9), ("7", 7), ("1500m", 1)],
)
def test_quantities_are_bytes(quantity: str, size: int) -> None:
    assert quantity_bytes(quantity) == size


def test_shards_too_small_for_their_engines_start_are_named_with_the_size_that_would_do() -> None:
    small = plan(data={"rows_per_shard": 250})
    said = next(note for note in small.notes if note.startswith("extract: starting the engine takes"))
    found = re.search(r"rows_per_shard of ([\d,]+) it would be 10%", said)
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
