"""The whole chain, locally: what runs again after which change. Real stages on a tiny target, engine: transformers."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from flyte_runs import pyflyte_run, write_prompts, write_recipe

from workflows import journal
from workflows.summary import STAGES


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
    from eagle3.target.engine import close_engines

    summary = chain.run()
    close_engines()
    return summary


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first run has shown evaluation, which starts the engine three times, and training in a process of its own, which
    imports for ten seconds; where only the journal is asked for, training stays here and evaluation measures nothing."""
    from eagle3.evaluation import benchmark
    from eagle3.training import launch
    from eagle3.training.loop import train

    def evaluate(*inputs: Any, watch: Any) -> dict[str, Any]:
        figures: dict[str, Any] = dict.fromkeys(("acceptance_length", "trainer_acceptance_length"), 1.5)
        figures |= {"acceptance_by_position": [0.5, 0.0, 0.0], "outputs_identical": True}
        figures |= {"tokens_per_s": {"with_draft": 2.0, "without_draft": 1.0}}
        Path(inputs[-1]).write_text(json.dumps(figures))
        return figures

    monkeypatch.setattr(benchmark, "evaluate", evaluate)
    monkeypatch.setattr(launch, "train_in_processes", lambda job, report: train(job))


@pytest.mark.slow
def test_a_first_run_makes_everything(chain: Chain, first: dict[str, Any]) -> None:
    expected = dict.fromkeys(STAGES, (1, 0)) | dict.fromkeys(("regenerate_responses", "extract_hidden_states"), (3, 0))
    assert counts(first) == expected | {"collect_agent_traces": (0, 0)}
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
def test_a_rerun_takes_everything_from_the_cache(chain: Chain, first: dict[str, Any]) -> None:
    again = chain.run()
    assert counts(again) == {name: (0, runs) for name, (runs, _) in counts(first).items()}
    assert sum(s["seconds"] for s in again["stages"]) < 1
    assert {k: v for k, v in again.items() if k != "stages"} == {k: v for k, v in first.items() if k != "stages"}


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
    again = chain.run(train={"init_from": export_dir, "learning_rate": 4e-3}, vocab={"size": 80})
    assert {name for name, (runs, _) in counts(again).items() if runs} == after


@pytest.mark.slow
@pytest.mark.usefixtures("light")
def test_a_draft_of_other_aux_layers_is_refused_before_anything_is_extracted(chain: Chain, first: dict[str, Any]) -> None:
    settings = {"train": {"init_from": chain.run()["export_dir"]}, "extract": {"layer_ids": [0, 1, 2]}}
    recipe = write_recipe(chain.workplace / "recipe.yaml", chain.target, chain.workplace / "prompts.jsonl", **settings)
    result = pyflyte_run(recipe)
    assert result.exit_code != 0
    assert "it reads aux layers [1, 2, 3], the states hold [0, 1, 2]" in " ".join(result.output.split())
    assert not [e for e in journal.entries() if e.stage == "extract_hidden_states"]


@pytest.mark.slow
@pytest.mark.usefixtures("light")
def test_appended_prompts_touch_only_new_shards(chain: Chain, first: dict[str, Any]) -> None:
    appended = counts(chain.run(num_prompts=15))
    assert appended["regenerate_responses"] == appended["extract_hidden_states"] == (2, 2)  # the last shard had two free places


@pytest.mark.slow
@pytest.mark.usefixtures("light")
def test_a_deleted_export_is_exported_and_evaluated_again(chain: Chain, first: dict[str, Any]) -> None:
    shutil.rmtree(first["export_dir"])
    again = chain.run()
    assert {name for name, (runs, _) in counts(again).items() if runs} == {"export_draft", "evaluate_draft"}
    assert Path(again["export_dir"], "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("light")
def test_the_number_of_replicas_is_in_no_key(chain: Chain, first: dict[str, Any]) -> None:
    assert not any(runs for runs, _ in counts(chain.run(fanout={"replicas": 1})).values())


@pytest.mark.slow
def test_the_terminal_shows_table_figures_and_the_lines_that_serve(chain: Chain, first: dict[str, Any]) -> None:
    summary = chain.run()
    for text in ("made or cached", "cached 3", "acceptance length", "tokens/s", summary["export_dir"], "--speculative-config"):
        assert text in chain.output
