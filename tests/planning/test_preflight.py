"""Settings that do not fit the target or the pods are refused; tests/workflows/test_first_node.py has whole runs."""

from dataclasses import replace
from typing import Any

import pytest

from eagle3.planning.preflight import MAX_SHARDS, check_rows, check_target
from tests.helpers.configs import LLAMA31_8B
from tests.helpers.plans import DISKS, GIB, SOURCES, settings

REFUSALS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"model_type": "gemma2"}, {}, "org/target is a 'gemma2' model"),
    ({"max_position_embeddings": 2048}, {}, "must not exceed the target's 2048 positions"),
    ({}, {"extract": {"layer_ids": [33]}}, "extract.layer_ids must be in 0 … 32"),
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
        {"intermediate_size": 28672},
        {"vocab": {"size": 128_256}, "resources": {"trainer": {"accelerator": "T4"}}},
        "must fit on one T4 of 16 GB, they take",
    ),
    (
        {},
        {"train": {"disk_budget_bytes": 10**12}},
        "resources.trainer.ephemeral_storage .* or lower train.disk_budget_bytes",
    ),
]


@pytest.mark.parametrize(
    ("changes", "blocks", "message"), REFUSALS, ids=[message[:40] for *_, message in REFUSALS]
)
def test_settings_that_do_not_fit_the_target_are_refused(
    changes: dict[str, Any], blocks: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_target(settings(**blocks), LLAMA31_8B | changes, "org/target", DISKS)


def test_settings_that_fit_pass() -> None:
    check_target(settings(), LLAMA31_8B, "org/target", DISKS)
    check_rows(settings(), LLAMA31_8B, SOURCES)


@pytest.mark.parametrize("pod", ["data", "engine", "trainer"])
def test_a_pod_without_room_for_the_targets_files_is_refused(pod: str) -> None:
    disks = DISKS | {pod: 10 * GIB}
    with pytest.raises(
        ValueError, match=f"resources.{pod}.ephemeral_storage must hold .* it is 11 GB; raise it"
    ):
        check_target(settings(), LLAMA31_8B, "org/target", disks)


def test_the_vocabulary_of_an_initial_draft_overrides_the_setting() -> None:
    cfg = settings(vocab={"size": 200_000})
    check_target(cfg, LLAMA31_8B, "org/target", DISKS, is_vocab_given=True)


def test_a_target_too_large_for_one_gpu_fits_on_two() -> None:
    wide = LLAMA31_8B | {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    }
    disks = dict.fromkeys(DISKS, 1000 * GIB)
    two = settings(fanout={"tensor_parallel_size": 2})
    check_target(two, wide, "org/target", disks)
    exact = settings(fanout={"tensor_parallel_size": 2}, evaluate={"dtype": "float32"})
    with pytest.raises(ValueError, match=r"2 x 127 GB .* for the evaluation: set evaluate.dtype"):
        check_target(exact, wide, "org/target", disks)
    with pytest.raises(ValueError, match=r"1 x 127 GB of GPU memory, they take 141 \+"):
        check_target(settings(), wide, "org/target", disks)


def test_too_few_rows_are_refused_only_where_all_are_counted() -> None:
    cfg = settings(data={"min_shards": 5, "rows_per_shard": 250})
    with pytest.raises(ValueError, match=r"1000 usable rows fill 4 shards .* data.min_shards = 5"):
        check_rows(cfg, LLAMA31_8B, SOURCES)
    for basis in ("estimated", "at_least"):
        check_rows(cfg, LLAMA31_8B, [replace(SOURCES[0], basis=basis)])


@pytest.mark.parametrize("basis", ["counted", "estimated", "at_least"])
def test_more_shards_than_one_fan_out_holds_are_refused(basis: Any) -> None:
    cfg = settings(data={"rows_per_shard": 10})
    fitting = replace(SOURCES[0], rows=10 * MAX_SHARDS, basis=basis)
    check_rows(cfg, LLAMA31_8B, [fitting])
    too_many = replace(fitting, rows=fitting.rows + 1)
    with pytest.raises(
        ValueError, match=r"at most 2400 shards.* 24001 rows fill 2401 .*raise data.rows_per_shard"
    ):
        check_rows(cfg, LLAMA31_8B, [too_many])


def test_rows_with_tools_need_a_tool_parser() -> None:
    tools = [replace(SOURCES[0], tool_tasks=1)]
    with pytest.raises(ValueError, match=r"rows with tools need regenerate.tool_parser"):
        check_rows(settings(), LLAMA31_8B, tools)
    check_rows(settings(regenerate={"tool_parser": "llama3_json"}), LLAMA31_8B, tools)
    check_rows(settings(regenerate={"enabled": False}), LLAMA31_8B, tools)


def test_chunks_of_one_shuffle_must_fit_the_trainers_disk_budget() -> None:
    cfg = settings(train={"disk_budget_bytes": 10**9})
    with pytest.raises(ValueError, match="lower train.shuffle_chunks or raise train.disk_budget_bytes"):
        check_rows(cfg, LLAMA31_8B, SOURCES)
    # All states of ten rows fit.
    few = replace(SOURCES[0], rows=10, tokens=1000, answers=10)
    check_rows(cfg, LLAMA31_8B, [few])
