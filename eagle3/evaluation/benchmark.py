"""Acceptance and speed of an exported draft on held-out prompts, measured by the engine and predicted by the training unroll.

The engine answers the prompts greedily without and with the draft. Without it, it writes on past the answers' ends, since the
last round of speculation looks there too. These texts are captured and unrolled; the walk over that unroll must give the
engine's own rounds and accepted counts (exactly so in float32).
"""

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from eagle3.config.engine import EngineConfig, EvaluateConfig, ExtractConfig
from eagle3.draft.acceptance import AcceptanceCounts, find_hits, guess, walk
from eagle3.draft.batch import pack_rows
from eagle3.draft.model import Eagle3Draft, load_exported
from eagle3.engine import engine as target_engine
from eagle3.engine.interface import EngineSettings, Generation, Speculation
from eagle3.engine.progress import Report, Watch
from eagle3.regenerate.answers import Sampling
from eagle3.shards.hidden_states import HiddenStateRow, read_hidden_states
from eagle3.shards.tokens import TokenRow, read_token_shard, write_token_shard
from eagle3.targets.properties import end_of_turn_ids
from eagle3.targets.weights import load_target_tensors

EXACT_ENCODING: dict[str, Literal["fp32", "bf16", "fp16"]] = {
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
}


@dataclass(frozen=True)
class Job:
    """What is measured, and how the target runs; the fields are evaluate's arguments."""

    target_dir: str
    export_dir: str
    engine: EngineConfig
    cfg: EvaluateConfig
    tensor_parallel_size: int
    watch: Callable[[str], Watch]


def evaluate(
    target_dir: str,
    export_dir: str,
    heldout_path: str,
    engine: EngineConfig,
    cfg: EvaluateConfig,
    out_path: str,
    tensor_parallel_size: int = 1,
    watch: Callable[[str], Watch] = Watch,
) -> dict[str, Any]:
    """Measure a draft and write the figures as JSON.

    Args:
        target_dir, export_dir: the target's files and the exported draft.
        heldout_path: token shard of prompts.
        engine: how the target runs; dtype and sequences in flight come from cfg.
        cfg: what is measured.
        out_path: evaluation.json.
        tensor_parallel_size: GPUs that share the target.
        watch: gives what shows a pass, by its label.

    Returns:
        The content of evaluation.json: acceptance_length, acceptance_by_position, rounds, accepted and their trainer_ twins,
        outputs_identical, differing_prompts (sample ids), tokens_per_s {with_draft, without_draft}, prompts, and the settings.

    Raises:
        ValueError: if a prompt leaves no room for the answer.
    """
    rows = read_token_shard(heldout_path)
    _check_room(heldout_path, rows, engine, cfg)
    job = Job(target_dir, export_dir, engine, cfg, tensor_parallel_size, watch)
    plain, drafted = _answer_twice(job, rows)
    written, end_ids = [a.token_ids for a in plain.answers], end_of_turn_ids(target_dir)
    lengths = [answer_length(ids, end_ids, cfg.max_new_tokens) for ids in written]
    predicted = _predict_acceptance(job, rows, written, lengths)
    report = _content(rows, lengths, plain, drafted, predicted)
    report |= {"engine": engine.engine, **cfg.model_dump()}
    Path(out_path).write_text(json.dumps(report, indent=1))
    return report


def _check_room(heldout_path: str, rows: list[TokenRow], engine: EngineConfig, cfg: EvaluateConfig) -> None:
    longest = max(rows, key=lambda r: len(r.token_ids))
    # Nearer the end rounds get fewer guesses.
    if len(longest.token_ids) + cfg.max_new_tokens + 2 * cfg.num_speculative_tokens > engine.max_model_len:
        raise ValueError(
            f"{heldout_path}: prompt {longest.sample_id} has {len(longest.token_ids)} tokens; with evaluate.max_new_tokens "
            f"{cfg.max_new_tokens} and 2k it exceeds engine.max_model_len {engine.max_model_len}; raise that or lower the other"
        )


def _answer_twice(job: Job, rows: list[TokenRow]) -> tuple[Generation, Generation]:
    """The target's greedy text without the draft, k tokens past the longest answer, and its answers with the draft."""
    settings = job.engine.model_copy(update={"dtype": job.cfg.dtype, "max_num_seqs": job.cfg.concurrency})
    prompts, length, k = [r.token_ids for r in rows], job.cfg.max_new_tokens, job.cfg.num_speculative_tokens
    build = partial(
        EngineSettings.from_dirs, job.target_dir, settings, tensor_parallel_size=job.tensor_parallel_size
    )
    longer = Sampling(temperature=0.0, top_p=1.0, max_new_tokens=length + k, ignore_eos=True)
    plain = target_engine.generate(build(), prompts, longer, watch=job.watch("evaluate without draft"))
    greedy = Sampling(temperature=0.0, top_p=1.0, max_new_tokens=length)
    drafted = build(speculation=Speculation(job.export_dir, k))
    return plain, target_engine.generate(drafted, prompts, greedy, watch=job.watch("evaluate with draft"))


def _content(
    rows: list[TokenRow],
    lengths: list[int],
    plain: Generation,
    drafted: Generation,
    predicted: AcceptanceCounts,
) -> dict[str, Any]:
    """The measured part of evaluation.json; lengths: of the answers within the text without the draft."""
    differing = [
        row.sample_id
        for row, text, length, answer in zip(rows, plain.answers, lengths, drafted.answers, strict=True)
        if text.token_ids[:length] != answer.token_ids
    ]
    return {
        **_figures(AcceptanceCounts(drafted.num_drafts, tuple(drafted.accepted_per_position)), ""),
        **_figures(predicted, "trainer_"),
        "outputs_identical": not differing,
        "differing_prompts": differing,
        "tokens_per_s": {
            "with_draft": drafted.generated_tokens / drafted.seconds,
            "without_draft": plain.generated_tokens / plain.seconds,
        },
        "prompts": len(rows),
        "generated_tokens": drafted.generated_tokens,
    }


def _figures(counts: AcceptanceCounts, prefix: str) -> dict[str, Any]:
    return {
        f"{prefix}acceptance_length": counts.acceptance_length,
        f"{prefix}acceptance_by_position": counts.by_position,
        f"{prefix}rounds": counts.rounds,
        f"{prefix}accepted": counts.accepted,
    }


def answer_length(token_ids: list[int], end_ids: list[int], max_new_tokens: int) -> int:
    """Tokens up to and including the first end token, at most `max_new_tokens`."""
    ends = (i + 1 for i, token in enumerate(token_ids[:max_new_tokens]) if token in end_ids)
    return next(ends, max_new_tokens)


def _predict_acceptance(
    job: Job, rows: list[TokenRow], written: list[list[int]], lengths: list[int]
) -> AcceptanceCounts:
    """The trainer's own figure: capture the target's greedy answers, unroll the draft over them, walk.

    Args:
        rows: the prompts.
        written: the target's greedy tokens after each, at least num_speculative_tokens - 1 of them past the answer's end.
        lengths: tokens of each answer.
    """
    draft, target_ids = load_exported(job.export_dir, load_target_tensors(job.target_dir).embedding)
    k = job.cfg.num_speculative_tokens
    counts = AcceptanceCounts.empty(k)
    with tempfile.TemporaryDirectory() as scratch:
        states_dir = _capture_answers(job, rows, written, scratch)
        with job.watch("evaluate: the walk") as shown, Report(shown) as report:
            report.begin(len(rows), "answers", lambda: report.conversations)
            for row, length, captured in zip(rows, lengths, read_hidden_states(states_dir), strict=True):
                by_position = _hits_by_position(draft, target_ids, captured, k)
                first = len(row.token_ids)
                counts = counts + walk(by_position, first, first + length - 1, k)
                report.add(len(captured.token_ids), 1)
                report.tell()
    return counts


def _capture_answers(job: Job, rows: list[TokenRow], written: list[list[int]], scratch: str) -> str:
    """Exact hidden states of every prompt with the target's text behind it; returns their directory, inside `scratch`."""
    whole = []
    for row, ids in zip(rows, written, strict=True):
        mask = [False] * len(row.token_ids) + [True] * len(ids)
        whole.append(TokenRow(row.sample_id, row.source, row.token_ids + ids, mask))
    write_token_shard(f"{scratch}/answers.parquet", whole)
    draft_config = json.loads((Path(job.export_dir) / "config.json").read_text())
    settings = EngineSettings.from_dirs(
        job.target_dir,
        job.engine.model_copy(update={"dtype": job.cfg.dtype}),
        layer_ids=draft_config["eagle_aux_hidden_state_layer_ids"],
        tensor_parallel_size=job.tensor_parallel_size,
    )
    extract = ExtractConfig(encoding=EXACT_ENCODING[job.cfg.dtype], compression="none")
    watch = job.watch("evaluate: capture the answers")
    target_engine.capture(settings, f"{scratch}/answers.parquet", f"{scratch}/states", extract, {}, watch)
    return f"{scratch}/states"


def _hits_by_position(
    draft: Eagle3Draft, target_ids: Tensor, captured: HiddenStateRow, ttt_steps: int
) -> Tensor:
    """[k, T] bool: whether the guess of TTT step i at a position is the target's own token."""
    batch = pack_rows([captured], ttt_steps)
    with torch.no_grad():
        hits = find_hits(guess(draft(batch), draft.lm_head.weight, target_ids), batch)
    by_position = torch.zeros(len(hits), len(captured.token_ids), dtype=torch.bool)
    by_position[:, batch.slots] = hits
    return by_position
