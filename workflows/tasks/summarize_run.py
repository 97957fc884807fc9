"""The end of a run: sample rows for the report, and the summary that a person reads."""

import json
from pathlib import Path

from flytekit import Cache, Deck, task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

import images
from eagle3.config import EngineConfig, EvaluateConfig
from workflows import journal, store, summary
from workflows.interfaces import DraftCheckpoint, DraftVocab, EvaluationReport, PreparedData, Target, TokenShards
from workflows.resources import DATA, LIGHT
from workflows.stage import stage

NUM_SAMPLES = 4


@task(container_image=images.CPU, cache=Cache(version="1", ignored_inputs=("shards", "target")), **DATA)
@stage
def sample_rows(shards: TokenShards, shards_digest: str, target: Target, target_digest: str) -> FlyteFile:
    """The first rows as text with their loss mask, for the report; cached, so that a rerun loads no tokenizer."""
    from eagle3.data.chat import load_chat_tokenizer, text_spans
    from eagle3.shards import read_token_shard

    tokenizer = load_chat_tokenizer(target.directory.download())
    rows = read_token_shard(shards.shards[0].file.download())[:NUM_SAMPLES]
    path = store.new_dir("sample_rows") / "samples.json"
    samples = [{"sample_id": r.sample_id, "spans": text_spans(tokenizer, r.token_ids, r.loss_mask)} for r in rows]
    path.write_text(json.dumps(samples))
    return FlyteFile(str(path))


@task(container_image=images.CPU, enable_deck=True, deck_fields=(), **LIGHT)
def summarize_run(
    run_name: str,
    target: Target,
    data: PreparedData,
    vocab: DraftVocab,
    samples: FlyteFile,
    checkpoint: DraftCheckpoint,
    report: EvaluationReport,
    engine: EngineConfig,
    evaluate: EvaluateConfig,
) -> FlyteDirectory:
    """Write summary.json and report.html: into runs/<run_name> here, into an output directory with a Deck in a pod."""
    from eagle3.evaluation.report import render_html

    local = store.is_local()
    out = summary.run_dir(run_name)
    target_dir, export_dir, draft_dir = (store.location(d) for d in (target.directory, report.export, checkpoint.directory))
    shell, python = summary.serve_lines(target_dir, export_dir, engine, evaluate, local)
    figures = json.loads(Path(report.file.download()).read_text())
    figures |= {
        "run_name": run_name,
        "target_dir": target_dir,
        "export_dir": export_dir,
        "report_html": str(out / "report.html"),
        "summary_json": str(out / "summary.json"),
        "metrics": f"{draft_dir}/metrics.jsonl",
        "stages": summary.stage_figures(journal.entries()) if local else [],
        "prompts": {"train": sum(s.rows for s in data.shards), "heldout": data.heldout.rows},
        "data": json.loads(Path(data.report.download()).read_text()),
        "vocab": {"size": vocab.size, "coverage": vocab.coverage},
        "serve": {"HTTP server": shell, "Python": python},
    }
    metrics = (Path(checkpoint.directory.download()) / "metrics.jsonl").read_text().splitlines()
    html = render_html(figures, [json.loads(line) for line in metrics], json.loads(Path(samples.download()).read_text()))
    summary.write_text(out / "report.html", html)
    summary.write_text(out / "summary.json", json.dumps(figures, indent=1))
    Deck("Summary", html)
    print(summary.render_text(figures), flush=True)
    return FlyteDirectory(str(out))
