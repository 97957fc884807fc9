"""Acceptance and speed of a draft on held-out prompts, measured by the engine and predicted by the trainer.

The engine answers the prompts greedily without and with the draft. The texts without the draft are captured,
and the draft is unrolled over them as in training; walking the unroll must give the engine's rounds and
accepted counts, in float32 exactly. These texts continue past the ends of the answers, because the last round
of speculation reads there.
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
    """Arguments of `evaluate`."""

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
    """Measure a draft, write evaluation.json to `out_path` and return its content.

    Args:
        heldout_path: token shard of prompts.
        engine: how the target runs; dtype and sequences in flight come from cfg.
        watch: makes the progress display of a pass from its label.

    Returns:
        acceptance_length, acceptance_by_position, rounds, accepted and the same with the prefix trainer_,
        outputs_identical, differing_prompts (sample ids), tokens_per_s {with_draft, without_draft}, prompts,
        generated_tokens, and the settings.
    """
    rows = read_token_shard(heldout_path)
    job = Job(target_dir, export_dir, engine, cfg, tensor_parallel_size, watch)
    plain, drafted = _answer_twice(job, rows)
    end_ids = end_of_turn_ids(target_dir)
    texts = [answer.token_ids for answer in plain.answers]
    lengths = [answer_length(text, end_ids, cfg.max_new_tokens) for text in texts]
    predicted = _predict_acceptance(job, rows, texts, lengths)
    report = _measured(rows, lengths, plain, drafted, predicted)
    report |= {"engine": engine.engine, **cfg.model_dump()}
    Path(out_path).write_text(json.dumps(report, indent=1))
    return report


def _answer_twice(job: Job, rows: list[TokenRow]) -> tuple[Generation, Generation]:
    """Generate without the draft, k tokens past the longest answer, then with the draft."""
    # The context has room for this: check_lengths demands 2k tokens after the longest prompt and answer.
    settings = job.engine.model_copy(update={"dtype": job.cfg.dtype, "max_num_seqs": job.cfg.concurrency})
    prompts = [row.token_ids for row in rows]
    length = job.cfg.max_new_tokens
    k = job.cfg.num_speculative_tokens
    build = partial(
        EngineSettings.from_dirs, job.target_dir, settings, tensor_parallel_size=job.tensor_parallel_size
    )
    longer = Sampling(temperature=0.0, top_p=1.0, max_new_tokens=length + k, ignore_eos=True)
    plain = target_engine.generate(build(), prompts, longer, watch=job.watch("evaluate without draft"))
    greedy = Sampling(temperature=0.0, top_p=1.0, max_new_tokens=length)
    drafted = build(speculation=Speculation(job.export_dir, k))
    return plain, target_engine.generate(drafted, prompts, greedy, watch=job.watch("evaluate with draft"))


def _measured(
    rows: list[TokenRow],
    lengths: list[int],
    plain: Generation,
    drafted: Generation,
    predicted: AcceptanceCounts,
) -> dict[str, Any]:
    """The measured part of evaluation.json; `lengths` are those of the answers without the draft."""
    differing = [
        row.sample_id
        for row, text, length, answer in zip(rows, plain.answers, lengths, drafted.answers, strict=True)
        if text.token_ids[:length] != answer.token_ids
    ]
    return {
        **_counts(AcceptanceCounts(drafted.num_drafts, tuple(drafted.accepted_per_position)), ""),
        **_counts(predicted, "trainer_"),
        "outputs_identical": not differing,
        "differing_prompts": differing,
        "tokens_per_s": {
            "with_draft": drafted.generated_tokens / drafted.seconds,
            "without_draft": plain.generated_tokens / plain.seconds,
        },
        "prompts": len(rows),
        "generated_tokens": drafted.generated_tokens,
    }


def _counts(counts: AcceptanceCounts, prefix: str) -> dict[str, Any]:
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
    job: Job, rows: list[TokenRow], texts: list[list[int]], lengths: list[int]
) -> AcceptanceCounts:
    """Predict acceptance as the trainer does: capture the greedy texts, unroll the draft, walk the unroll.

    A text continues at least num_speculative_tokens - 1 tokens past the end of its answer.
    """
    draft, target_ids = load_exported(job.export_dir, load_target_tensors(job.target_dir).embedding)
    k = job.cfg.num_speculative_tokens
    counts = AcceptanceCounts.empty(k)
    with tempfile.TemporaryDirectory() as scratch:
        states_dir = _capture_answers(job, rows, texts, scratch)
        with job.watch("evaluate: the walk") as shown, Report(shown) as report:
            report.start(len(rows), "answers", lambda: report.conversations)
            for row, length, captured in zip(rows, lengths, read_hidden_states(states_dir), strict=True):
                by_position = _hits_by_position(draft, target_ids, captured, k)
                first = len(row.token_ids)
                counts = counts + walk(by_position, first, first + length - 1, k)
                report.add(len(captured.token_ids), 1)
                report.send_if_due()
    return counts


def _capture_answers(job: Job, rows: list[TokenRow], texts: list[list[int]], scratch: str) -> str:
    """Capture exact hidden states of every prompt and text into `scratch`; returns their directory."""
    answered = []
    for row, text in zip(rows, texts, strict=True):
        mask = [False] * len(row.token_ids) + [True] * len(text)
        answered.append(TokenRow(row.sample_id, row.source, row.token_ids + text, mask))
    write_token_shard(f"{scratch}/answers.parquet", answered)
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
    """[k, T] bool, True where the guess of a TTT step at a position is the target's token."""
    batch = pack_rows([captured], ttt_steps)
    with torch.no_grad():
        hits = find_hits(guess(draft(batch), draft.lm_head.weight, target_ids), batch)
    by_position = torch.zeros(len(hits), len(captured.token_ids), dtype=torch.bool)
    by_position[:, batch.slots] = hits
    return by_position
