"""The whole chain, locally: what runs again after which change. Real stages on a tiny target, engine:
transformers."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.flyte_runs import pyflyte_run, write_prompts, write_recipe
from workflows.flyte import journal
from workflows.flyte.journal import STAGES


class Chain:
    """Runs the chain in one workplace again and again."""

    def __init__(self, workplace: Path, target: Path) -> None:
        self.workplace, self.target = workplace, target

    def run(self, num_prompts: int = 10, **blocks: Any) -> dict[str, Any]:
        prompts = write_prompts(self.workplace / "prompts.jsonl", 0, num_prompts)
        result = pyflyte_run(write_recipe(self.workplace / "recipe.yaml", self.target, prompts, **blocks))
        assert result.exit_code == 0, (result.output, result.exception)
        self.output = result.output
        summary: dict[str, Any] = json.loads((self.workplace / "runs/tiny/summary.json").read_text())
        return summary


def counts(summary: dict[str, Any]) -> dict[str, tuple[int, int]]:
    return {s["name"]: (s["runs"], s["cached"]) for s in summary["stages"]}


@pytest.fixture(scope="module")
def chain(workplace: Path, tiny_target: Path) -> Chain:
    return Chain(workplace, tiny_target)


@pytest.fixture(scope="module")
def first(chain: Chain) -> dict[str, Any]:
    """The first run; it closes the engine, so that later runs show whether they start one."""
    from eagle3.engine.engine import stop

    summary = chain.run()
    stop()
    return summary


@pytest.mark.slow
def test_a_first_run_makes_everything(chain: Chain, first: dict[str, Any]) -> None:
    expected = dict.fromkeys(STAGES, (1, 0)) | dict.fromkeys(
        ("regenerate_responses", "extract_hidden_states"), (3, 0)
    )
    assert counts(first) == expected
    assert first["prompts"] == {"train": 10, "heldout": 2}
    assert first["outputs_identical"]
    assert set(first["tokens_per_s"]) == {"with_draft", "without_draft"}
    assert first["acceptance_length"] == first["trainer_acceptance_length"]
    assert (first["rounds"], first["accepted"]) == (first["trainer_rounds"], first["trainer_accepted"])
    assert Path(first["export_dir"], "model.safetensors").exists()
    assert Path(first["target_dir"], "config.json").exists()
    assert Path(first["metrics"]).exists()
    assert "<svg" in Path(first["report_html"]).read_text()


@pytest.mark.slow
def test_the_data_page_shows_what_was_trained_on(chain: Chain, first: dict[str, Any]) -> None:
    report = json.loads((chain.workplace / "runs/tiny/data.json").read_text())
    rows, answers = report["rows"]["train"], first["answers"]
    assert answers == report["answers"]
    assert answers["requested"] == 10 == answers["answered"] + answers["failed"] + answers["skipped"]
    assert rows["rows"] == answers["answered"]
    assert report["vocab"]["size"] == first["vocab"]["size"] == 64
    assert report["vocab"]["coverage"] == first["vocab"]["coverage"]
    inside, supervised = report["vocab"]["by_source"]["train"]
    assert (inside / supervised, supervised) == (first["vocab"]["coverage"], rows["supervised_tokens"])
    assert all(any(is_supervised for _, is_supervised in sample["spans"]) for sample in report["samples"])
    assert "<mark>" in Path(first["data_html"]).read_text()


@pytest.mark.slow
def test_the_summary_says_from_what_it_was_made(chain: Chain, first: dict[str, Any]) -> None:
    assert first["settings"]["vocab"] == {"size": 64}
    assert first["settings"]["train"]["pack_tokens"] == 128
    assert first["settings"].keys() == {
        "target", "engine", "data", "regenerate", "vocab", "extract", "train", "export", "evaluate", "fanout",
    }  # fmt: skip
    assert {name for name, digest in first["digests"].items() if not digest} == {"sources", "init"}
    assert first["versions"]["capture"]["engine_version"].startswith("transformers ")
    assert first["versions"]["summary"]["torch"] == first["versions"]["capture"]["torch_version"]


@pytest.mark.slow
def test_a_rerun_takes_everything_from_the_cache(chain: Chain, first: dict[str, Any]) -> None:
    again = chain.run()
    assert counts(again) == {name: (0, runs) for name, (runs, _) in counts(first).items()}
    assert sum(s["seconds"] for s in again["stages"]) < 1
    changing = {"stages", "date"}
    assert {k: v for k, v in again.items() if k not in changing} == {
        k: v for k, v in first.items() if k not in changing
    }


@pytest.mark.slow
@pytest.mark.usefixtures("light")
def test_another_learning_rate_trains_exports_and_evaluates(chain: Chain, first: dict[str, Any]) -> None:
    ran = {name for name, (runs, _) in counts(chain.run(train={"learning_rate": 2e-3})).items() if runs}
    assert ran == {"train_draft", "export_draft", "evaluate_draft"}


@pytest.mark.slow
@pytest.mark.usefixtures("light")
def test_another_vocabulary_answers_and_extracts_nothing(chain: Chain, first: dict[str, Any]) -> None:
    ran = {name for name, (runs, _) in counts(chain.run(vocab={"size": 80})).items() if runs}
    assert ran == {"build_vocab", "train_draft", "export_draft", "evaluate_draft"}


@pytest.mark.slow
@pytest.mark.usefixtures("light")
def test_a_warm_start_keeps_the_drafts_vocabulary_wherever_it_lies(
    chain: Chain, first: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    export_dir = chain.run()["export_dir"]
    warm = chain.run(train={"init_from": "runs/tiny", "learning_rate": 3e-3}, vocab={"size": 80})
    after = {"train_draft", "export_draft", "evaluate_draft"}
    assert {name for name, (runs, _) in counts(warm).items() if runs} == {"build_vocab"} | after
    assert warm["vocab"] == first["vocab"]
    assert "vocab.size 80 is ignored: the initial draft has 64 tokens" in caplog.text
    elsewhere = chain.run(train={"init_from": export_dir, "learning_rate": 3e-3}, vocab={"size": 80})
    assert not any(runs for runs, _ in counts(elsewhere).values())  # the same draft by another path
    again = chain.run(train={"init_from": export_dir, "learning_rate": 4e-3}, vocab={"size": 80})
    assert {name for name, (runs, _) in counts(again).items() if runs} == after


@pytest.mark.slow
@pytest.mark.usefixtures("light")
def test_a_draft_of_other_aux_layers_is_refused_before_anything_is_extracted(
    chain: Chain, first: dict[str, Any]
) -> None:
    settings = {"train": {"init_from": chain.run()["export_dir"]}, "extract": {"layer_ids": [0, 1, 2]}}
    recipe = write_recipe(
        chain.workplace / "recipe.yaml", chain.target, chain.workplace / "prompts.jsonl", **settings
    )
    result = pyflyte_run(recipe)
    assert result.exit_code != 0
    assert "it reads aux layers [1, 2, 3], the states hold [0, 1, 2]" in " ".join(result.output.split())
    assert not [e for e in journal.entries() if e.stage == "extract_hidden_states"]


@pytest.mark.slow
@pytest.mark.usefixtures("light")
def test_appended_prompts_touch_only_new_shards(chain: Chain, first: dict[str, Any]) -> None:
    appended = counts(chain.run(num_prompts=15))
    assert (
        appended["regenerate_responses"] == appended["extract_hidden_states"] == (2, 2)
    )  # the last shard had two free places


@pytest.mark.slow
@pytest.mark.usefixtures("light")
def test_a_deleted_export_is_exported_and_evaluated_again(chain: Chain, first: dict[str, Any]) -> None:
    shutil.rmtree(first["export_dir"])
    again = chain.run()
    assert {name for name, (runs, _) in counts(again).items() if runs} == {"export_draft", "evaluate_draft"}
    assert Path(again["export_dir"], "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("light")
def test_neither_the_number_of_replicas_nor_the_pods_resources_are_in_a_key(
    chain: Chain, first: dict[str, Any]
) -> None:
    asked = {"trainer": {"accelerator": "H100"}, "engine": {"spot": False}, "data": {"cpu": "2"}}
    assert not any(runs for runs, _ in counts(chain.run(fanout={"replicas": 1}, resources=asked)).values())


@pytest.mark.slow
def test_the_terminal_shows_table_figures_and_the_lines_that_serve(
    chain: Chain, first: dict[str, Any]
) -> None:
    summary = chain.run()
    texts = (
        "made or cached",
        "cached 3",
        "answers      ",
        "acceptance length",
        "tokens/s",
        summary["data_html"],
    )
    for text in (*texts, summary["export_dir"], "--speculative-config"):
        assert text in chain.output
