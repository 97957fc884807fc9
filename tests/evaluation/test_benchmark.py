"""A whole measurement with the transformers engine: its passes and counts; where an answer ends."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eagle3.config.engine import EngineConfig, EvaluateConfig
from eagle3.engine import engine
from eagle3.engine.engine import stop
from eagle3.engine.interface import EngineSettings
from eagle3.engine.progress import Progress, Watch
from eagle3.evaluation.benchmark import answer_length, evaluate
from eagle3.shards.tokens import TokenRow, write_token_shard
from tests.helpers.exports import write_exported
from tests.helpers.factories import draft_config, tiny_target

K = 2
REFERENCE = EngineConfig(engine="transformers", dtype="float32", max_model_len=64, max_num_seqs=4)


@pytest.fixture(autouse=True)
def _engines() -> Iterator[None]:
    yield
    stop()


def write_inputs(path: Path) -> tuple[str, str, str]:
    """Directories of a random target and a random draft for it, and a shard of five prompts."""
    tiny_target("llama", eos_token_id=2).float().save_pretrained(path / "target")
    export_dir = write_exported(path, draft_config(), K)
    prompts = [[3 + i, 5, 7 + i][: 1 + i % 3] for i in range(5)]
    write_token_shard(
        path / "prompts", [TokenRow(f"p:{i}", "test", p, [False] * len(p)) for i, p in enumerate(prompts)]
    )
    return str(path / "target"), str(export_dir), str(path / "prompts")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the reference engine is tested on Linux")
def test_every_pass_reports_progress_and_the_walk_counts_as_the_engine_does(tmp_path: Path) -> None:
    samples: dict[str, list[Progress]] = {}

    def watch(label: str) -> Watch:
        return Watch(label, samples.setdefault(label, []).append)

    cfg = EvaluateConfig(num_speculative_tokens=K, max_new_tokens=6, dtype="float32", concurrency=4)
    report = evaluate(*write_inputs(tmp_path), REFERENCE, cfg, str(tmp_path / "evaluation.json"), watch=watch)
    assert list(samples) == [
        "evaluate without draft",
        "evaluate with draft",
        "evaluate: capture the answers",
        "evaluate: the walk",
    ]
    ends = {label: passed[-1] for label, passed in samples.items()}
    assert all(end.done == end.total for end in ends.values())
    assert [end.total for label, end in ends.items() if end.unit == "answers"] == [5, 5, 5]
    assert ends["evaluate with draft"].tokens == report["generated_tokens"]
    assert ends["evaluate: the walk"].tokens == ends["evaluate: capture the answers"].total
    assert (report["rounds"], report["accepted"]) == (report["trainer_rounds"], report["trainer_accepted"])
    assert report["outputs_identical"]
    assert json.loads((tmp_path / "evaluation.json").read_text()) == report


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the reference engine is tested on Linux")
def test_every_engine_uses_the_given_number_of_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    run = engine.run

    def record(settings: EngineSettings, *more: Any) -> Any:
        asked.append(settings.tensor_parallel_size)
        return run(settings, *more)

    monkeypatch.setattr(engine, "run", record)
    cfg = EvaluateConfig(num_speculative_tokens=K, max_new_tokens=4, dtype="float32")
    evaluate(*write_inputs(tmp_path), REFERENCE, cfg, str(tmp_path / "evaluation.json"), 2)
    assert asked == [2, 2, 2]


@pytest.mark.parametrize(
    ("token_ids", "length"),
    [
        ([5, 6, 2, 7, 8], 3),
        ([2, 5, 6, 7, 8], 1),
        ([5, 6, 7, 8, 2], 4),
        ([5, 6, 7, 9, 2], 4),
        ([5, 6, 7, 3, 2], 4),
    ],
)
def test_an_answer_ends_at_its_first_end_token_or_the_limit(token_ids: list[int], length: int) -> None:
    assert answer_length(token_ids, [2, 3], 4) == length
