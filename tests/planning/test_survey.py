"""Surveys of sources: exact if they are read whole, close if they are sampled."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eagle3.config.data import DataConfig, SourceConfig
from eagle3.data.prepare import prepare_shards
from eagle3.planning import survey as surveying
from eagle3.planning.survey import survey
from eagle3.planning.workload import SourceSurvey, Workload, workload
from tests.helpers.plans import settings
from tests.helpers.tiny_tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer().save_pretrained(str(path))
    return path


def conversation(i: int) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": f"Say {i}."},
            {"role": "assistant", "content": f"the answer is {i} " * (i % 7)},
        ]
    }


def write(path: Path, rows: list[dict[str, Any]]) -> SourceConfig:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return SourceConfig(path=str(path), name=path.stem)


@pytest.fixture
def heldout(tmp_path: Path) -> SourceConfig:
    return write(tmp_path / "heldout.jsonl", [{"prompt": f"Say {i}."} for i in range(3)])


@pytest.mark.parametrize("regenerate", [True, False])
def test_small_sources_are_counted_as_prepare_will(
    tokenizer_dir: Path, tmp_path: Path, heldout: SourceConfig, regenerate: bool
) -> None:
    rows = [conversation(i) for i in range(40)]
    sources = [
        write(tmp_path / "a.jsonl", [*rows, rows[5], {"messages": 7}]),
        write(tmp_path / "b.jsonl", rows[30:] + [conversation(i) for i in range(50, 60)]),
        write(tmp_path / "c.jsonl", [conversation(i) for i in range(70, 90)]).model_copy(
            update={"max_rows": 4}
        ),
    ]
    cfg = DataConfig(sources=sources, rows_per_shard=8, max_dropped_share=0.9)
    made = prepare_shards(heldout, tokenizer_dir, cfg, regenerate, tmp_path / "out")
    found, num_heldout = survey(sources, heldout, tokenizer_dir, cfg, regenerate)
    work = workload(settings(data=cfg, regenerate={"enabled": regenerate, "max_new_tokens": 10}), found)
    statistics = made.report["sources"]
    assert [(s.name, s.rows, s.tokens, s.supervised) for s in found] == [
        (name, f["rows_kept"], f["tokens"], f["supervised_tokens"]) for name, f in statistics.items()
    ]
    assert {s.basis for s in found} == {"counted"}
    assert [s.dropped_share for s in found] == pytest.approx(
        [1 - f["rows_kept"] / f["rows_read"] for f in statistics.values()]
    )
    assert (work.rows, work.shards) == (made.report["rows_kept"], len(made.shards))
    assert num_heldout == made.heldout.summary.rows
    assert work.new_tokens == (5 * work.rows if regenerate else 0)
    assert work.max_tokens == made.report["tokens"] + (10 * work.rows if regenerate else 0)


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
def test_large_sources_are_estimated_from_their_first_rows(
    tokenizer_dir: Path, tmp_path: Path, heldout: SourceConfig, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    rows = [conversation(i + 100) for i in range(900)]
    path = tmp_path / f"many.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text(
            json.dumps(rows) if kind == "json" else "".join(json.dumps(row) + "\n" for row in rows)
        )
    source = SourceConfig(path=str(path), name="many")
    ((whole,), _) = survey([source], heldout, tokenizer_dir, DataConfig(), regenerate=True)
    monkeypatch.setattr(surveying, "COUNT_ROWS", 200)
    monkeypatch.setattr(surveying, "SAMPLE_ROWS", 140)
    ((sampled,), _) = survey([source], heldout, tokenizer_dir, DataConfig(), regenerate=True)
    assert (whole.basis, sampled.basis) == ("counted", "estimated")
    assert sampled.rows == pytest.approx(whole.rows, rel=0.02)
    assert sampled.tokens == pytest.approx(whole.tokens, rel=0.05)
    limited = source.model_copy(update={"max_rows": 300})
    assert survey([limited], heldout, tokenizer_dir, DataConfig(), regenerate=True)[0][0].rows == 300


def test_counts_are_lower_bounds_if_rows_cannot_be_counted(
    tokenizer_dir: Path, tmp_path: Path, heldout: SourceConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gzip

    path = tmp_path / "many.jsonl.gz"
    with gzip.open(path, "wt") as f:
        f.writelines(json.dumps(conversation(i + 10)) + "\n" for i in range(60))
    monkeypatch.setattr(surveying, "COUNT_ROWS", 20)
    monkeypatch.setattr(surveying, "SAMPLE_ROWS", 10)
    ((found,), _) = survey(
        [SourceConfig(path=str(path))], heldout, tokenizer_dir, DataConfig(), regenerate=True
    )
    assert (found.basis, found.rows) == (
        "at_least",
        round(21 * 0.9),
    )  # one row of the ten has no answer to ask for


def test_a_source_with_mostly_unusable_rows_is_refused(
    tokenizer_dir: Path, tmp_path: Path, heldout: SourceConfig
) -> None:
    source = write(tmp_path / "bad.jsonl", [{"messages": 7}] * 3 + [conversation(9)])
    with pytest.raises(
        ValueError,
        match=r"bad\.jsonl: 3 of the first 4 rows cannot be used, more than data\.max_dropped_share",
    ):
        survey([source], heldout, tokenizer_dir, DataConfig(), regenerate=True)


def test_a_sample_is_refused_only_if_no_row_is_usable(
    tokenizer_dir: Path, tmp_path: Path, heldout: SourceConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(surveying, "COUNT_ROWS", 20)
    monkeypatch.setattr(surveying, "SAMPLE_ROWS", 10)
    late = [*[{"messages": 7}] * 9, *(conversation(i + 10) for i in range(60))]
    source = write(tmp_path / "late.jsonl", late)
    ((found,), _) = survey([source], heldout, tokenizer_dir, DataConfig(), regenerate=True)
    assert found.dropped_share == pytest.approx(0.9)
    useless = write(tmp_path / "useless.jsonl", [{"messages": 7}] * 10 + late)
    with pytest.raises(ValueError, match="10 of the first 10 rows cannot be used"):
        survey([useless], heldout, tokenizer_dir, DataConfig(), regenerate=True)


def test_a_run_without_held_out_prompts_is_refused(
    tokenizer_dir: Path, tmp_path: Path, heldout: SourceConfig
) -> None:
    source = write(tmp_path / "a.jsonl", [conversation(9)])
    with pytest.raises(
        ValueError, match=r"heldout\.jsonl: no held-out prompt is left; raise data\.max_prompt_tokens"
    ):
        survey([source], heldout, tokenizer_dir, DataConfig(max_prompt_tokens=1), regenerate=True)


def source_of(rows: int, tokens: int) -> SourceSurvey:
    return SourceSurvey("s", "counted", rows, tokens, 0, rows, 0, 0.0)


def test_answers_to_come_are_counted_with_the_limit_of_their_source(
    tokenizer_dir: Path, tmp_path: Path, heldout: SourceConfig
) -> None:
    turns = [
        {"role": role, "content": f"word {role}"}
        for role in ("user", "assistant", "user", "assistant", "user")
    ]
    source = write(tmp_path / "a.jsonl", [{"messages": turns}, {"prompt": "one"}])
    (found,), _ = survey([source], heldout, tokenizer_dir, DataConfig(), regenerate=True)
    assert (found.rows, found.answers) == (2, 4)
    regenerate = {"max_new_tokens": 8, "sources": {found.name: {"max_new_tokens": 20}}}
    work = workload(settings(regenerate=regenerate), [found])
    assert (work.new_tokens, work.shards) == (4 * 20 // 2, 1)
    tools = write(tmp_path / "t.jsonl", [{"prompt": "one"}, {"prompt": "two", "tools": [{"name": "look"}]}])
    (found,), _ = survey([tools], heldout, tokenizer_dir, DataConfig(), regenerate=True)
    assert (found.rows, found.tool_tasks) == (2, 1)
    for weight in (0.0, 1.0):
        weighted = {"sources": [tools.model_copy(update={"weight": weight})]}
        assert workload(settings(data=weighted), [found]).shards == 2
    own = write(tmp_path / "b.jsonl", [{"messages": turns[:4]}])
    (found,), _ = survey([own], heldout, tokenizer_dir, DataConfig(), regenerate=False)
    assert (found.rows, found.answers) == (1, 0)


def test_a_weighted_mix_ends_when_the_first_source_is_used_up() -> None:
    surveys = [source_of(100, 1000), source_of(900, 18000)]

    def mix(*weights: float) -> Workload:
        sources = [{"path": "x", "weight": weight} for weight in weights]
        cfg = settings(data={"sources": sources, "rows_per_shard": 64}, regenerate={"max_new_tokens": 8})
        return workload(cfg, surveys)

    weighted = mix(1.0, 2.0)
    assert (weighted.rows, weighted.shards, weighted.prompt_tokens) == (300, 5, 1000 + 200 * 20)
    apart = mix(0.0, 0.0)
    assert (apart.rows, apart.shards) == (1000, 2 + 15)
    assert apart.tokens == 19000 + 1000 * 4
    assert apart.max_supervised == 8000
