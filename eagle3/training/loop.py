"""The training run: shards and vocabulary in, draft out; goes on from its own checkpoint.

plan the packs -> for every step: read its packs, train_step, log, validate, keep the best, checkpoint -> draft.safetensors
"""

import json
import logging
import shutil
import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from eagle3.config.training import TrainConfig
from eagle3.draft.acceptance import AcceptanceCounts, walk_batch
from eagle3.draft.batch import PackedBatch
from eagle3.draft.loss import TargetHead
from eagle3.draft.model import DraftConfig, Eagle3Draft, init_draft, load_exported
from eagle3.files import atomic_path, digest_of
from eagle3.targets.weights import TargetTensors, load_target_tensors
from eagle3.training.checkpoint import (
    CHECKPOINT_NAME,
    Progress,
    load_checkpoint,
    save_checkpoint,
    trained_tensors,
)
from eagle3.training.distributed import DistContext
from eagle3.training.launch import Preempted, TrainJob
from eagle3.training.loader import ShardRows, read_packs
from eagle3.training.metrics import MetricLog
from eagle3.training.optimizer import learning_rate_factor, make_optimizers, set_learning_rate
from eagle3.training.schedule import Schedule, make_schedule, split_pack
from eagle3.training.step import PART_TOKENS, Objective, Trainer, judge, train_step
from eagle3.vocab import load_vocab

logger = logging.getLogger(__name__)
DRAFT_WEIGHTS, DRAFT_CONFIG, METRICS = "draft.safetensors", "draft.json", "metrics.jsonl"
ALONE = DistContext(0, 1, torch.device("cpu"))


def train(
    job: TrainJob, ranks: DistContext = ALONE, should_stop: Callable[[int], bool] = lambda step: False
) -> None:
    """Train a draft and write draft.safetensors, draft.json and metrics.jsonl into job.out_dir.

    Args:
        job: inputs and settings; out_dir also holds the checkpoint, and a run that finds one there goes on from it.
        ranks: this process among those that train together.
        should_stop: asked with the number of steps done before each step.

    Raises:
        Preempted: when should_stop says so; a checkpoint has been saved.
        ValueError: on shards, vocabulary, target and initial draft that do not fit together.
        FloatingPointError: on a non-finite loss or gradient, before it reaches a checkpoint; names the conversations of the pack.
    """
    out = Path(job.out_dir)
    cache_dir = (
        out / f"chunks-{ranks.rank}"
    )  # stays when killed: the next attempt takes over what was fetched
    cache_dir.mkdir(parents=True, exist_ok=True)
    rows = ShardRows(job.shard_dirs, cache_dir, job.cfg.disk_budget_bytes // ranks.size)
    for found in rows.layer_ids:
        if found != job.layer_ids:
            raise ValueError(
                f"the shards hold aux layers {found}, the job says {job.layer_ids}; extract those or train on these"
            )
    trainer, identity = make_trainer(job, ranks)
    run(
        trainer,
        make_schedule(rows, job.cfg, identity),
        rows,
        out,
        should_stop,
        judge_first=bool(job.init_dir),
    )
    shutil.rmtree(cache_dir)


def make_trainer(job: TrainJob, ranks: DistContext) -> tuple[Trainer, str]:
    """Build draft, loss and optimizers on this process's device.

    Returns:
        The trainer, and the identity of everything but data and settings that decides the result.
    """
    cfg = job.cfg
    dtype = (
        torch.bfloat16
        if cfg.dtype == "bfloat16" or (cfg.dtype == "auto" and ranks.device.type == "cuda")
        else torch.float32
    )
    vocab = load_vocab(job.vocab_path)
    target = load_target_tensors(job.target_dir, dtype)
    if len(vocab.t2d) != len(target.head):
        raise ValueError(
            f"{job.vocab_path} is for a target of {len(vocab.t2d)} tokens, {job.target_dir} has {len(target.head)}; make it again"
        )
    draft = make_draft(job, target, vocab.target_ids).to(ranks.device)
    lk_eta = cfg.lk_eta if cfg.loss == "lk_hybrid" else None
    objective = Objective(draft, target_head(target, vocab.target_ids, ranks.device), dtype, lk_eta)
    initial = (
        digest_of(*(p.detach().cpu().numpy().tobytes() for p in draft.parameters())) if job.init_dir else ""
    )
    identity = digest_of(str(draft.config.to_dict()), vocab.digest, initial)
    return Trainer.of(objective, make_optimizers(draft, cfg), ranks, cfg), identity


def make_draft(job: TrainJob, target: TargetTensors, target_ids: Tensor) -> Eagle3Draft:
    """A new draft for the target, or the one in job.init_dir with its flags; parameters float32.

    Raises:
        ValueError: if the initial draft has another vocabulary.
    """
    if not job.init_dir:
        config = DraftConfig.from_target(target.config, job.layer_ids, len(target_ids), job.cfg)
        return init_draft(config, target, target_ids, job.cfg)
    draft, ids = load_exported(job.init_dir, target.embedding)
    if not torch.equal(ids, target_ids):
        raise ValueError(
            f"{job.init_dir} drafts other tokens than {job.vocab_path}; a draft goes on with its own vocabulary"
        )
    draft.config = replace(draft.config, target_architectures=target.config.get("architectures") or [])
    draft.lm_head.weight.requires_grad_(job.cfg.head != "target_frozen")
    return draft


def target_head(target: TargetTensors, target_ids: Tensor, device: torch.device) -> TargetHead:
    """The target's side of the loss, on a device."""
    head = target.head.to(device)
    return TargetHead(
        target.norm_weight.to(device), target.norm_eps, head[target_ids], target_ids.to(device), head
    )


def run(
    trainer: Trainer,
    schedule: Schedule,
    rows: ShardRows,
    out: Path,
    should_stop: Callable[[int], bool],
    judge_first: bool,
) -> None:
    """Take the steps that are left, then write the draft.

    Args:
        judge_first: the initial weights may be the best.
    """
    ranks, cfg, total = trainer.ranks, trainer.cfg, len(schedule.steps)
    state = TrainingRun(trainer, schedule, out)
    done = state.progress.step
    logger.info(
        "%d of %d steps done, %d rows, %d processes, %s",
        done,
        total,
        len(rows.lengths),
        ranks.size,
        ranks.device,
    )
    held_out = list(
        read_packs(rows, schedule.validation[ranks.rank :: ranks.size], cfg.pack_tokens, cfg.ttt_steps)
    )
    if schedule.validation and not ranks.any(any(len(batch.slots) for batch in held_out)):
        logger.warning(
            "the %d held-out packs have no supervised slot: no weights are better than others",
            len(schedule.validation),
        )
    with (
        tqdm(
            total=total, initial=done, desc="train_draft", unit="step", mininterval=2, disable=ranks.rank > 0
        ) as bar,
        closing(step_batches(rows, schedule, done, ranks, cfg)) as packs_of_steps,
    ):
        state.log.on_flush = partial(_show, bar)
        if judge_first and done == 0 and schedule.validation:
            length = state.validate(held_out)["validation_acceptance_length"]
            logger.info("the initial draft has a held-out acceptance length of %.3f", length)
        for step in range(done, total):
            if ranks.any(should_stop(step)):
                state.save()
                ranks.any(
                    False
                )  # nobody leaves before the file is whole: torchrun ends the others soon after the first
                raise Preempted(f"stopped after {step} of {total} steps; run again to go on")
            state.take_step(*next(packs_of_steps), held_out)
    if done < total and not state.log.num_supervised:
        raise ValueError(
            f"no row has two supervised tokens in a row within train.pack_tokens {cfg.pack_tokens}, so nothing was learnt; "
            "raise it, or look at the loss masks"
        )
    if ranks.rank == 0:
        write_draft(state.draft, state.progress.best if cfg.keep == "best" else {}, out)


def _show(bar: "tqdm[Any]", line: dict[str, Any]) -> None:
    bar.set_postfix_str(
        f"loss {line['loss']:.3f}, {line['supervised_per_s']:.0f} supervised tok/s", refresh=False
    )
    bar.update(line["step"] - bar.n)


class TrainingRun:
    """A run at some step: weights, optimizers, progress and log, from the checkpoint in `out` where there is one."""

    def __init__(self, trainer: Trainer, schedule: Schedule, out: Path) -> None:
        self.trainer, self.schedule, self.path = trainer, schedule, out / CHECKPOINT_NAME
        self.draft = trainer.objective.unrolled.draft
        self.progress = Progress(0, {}, 0.0, b"")
        if self.path.exists():
            self.progress = load_checkpoint(self.path, self.draft, trainer.optimizers, schedule.digest)
        metrics_path = out / METRICS if trainer.ranks.rank == 0 else None
        self.log = MetricLog(metrics_path, len(schedule.steps), self.progress.step, self.progress.metrics)

    def take_step(self, batches: list[PackedBatch], wait_s: float, held_out: list[PackedBatch]) -> None:
        """Train on the packs of the next step; log, validate and save where it is due."""
        for batch in batches:
            self._check_fits(batch)
        cfg, step, total = self.trainer.cfg, self.progress.step, len(self.schedule.steps)
        started = time.process_time()
        factor = learning_rate_factor(step, total, cfg)
        set_learning_rate(self.trainer.optimizers, factor)
        figures = train_step(self.trainer, batches)
        all_hits, done = figures.pop("hits"), step + 1
        self.progress = replace(self.progress, step=done)
        if (
            self.log.is_due(done) or self.trainer.ranks.device.type == "cpu"
        ):  # reading the hits would hold a GPU up
            walks = [walk_batch(hits, batch) for hits, batch in zip(all_hits, batches, strict=True)]
            figures["acceptance_length"] = sum(walks, AcceptanceCounts.empty(cfg.ttt_steps)).acceptance_length
        if done in self.schedule.validate_after:
            figures |= self.validate(held_out)
        ids = [row for batch in batches for row in batch.sample_ids]
        rate, cpu_s = cfg.learning_rate * factor, round(time.process_time() - started, 4)
        self.log.add(done, ids, **figures, learning_rate=rate, wait_s=wait_s, cpu_s=cpu_s)
        if done % cfg.checkpoint_every == 0 or done == total:
            self.save()

    def _check_fits(self, batch: PackedBatch) -> None:
        """Refuse states of another target: on a GPU a wrong size or token would end the process without a word."""
        config, num_tokens = self.draft.config, len(self.draft.get_buffer("embedding"))
        wanted = (len(config.eagle_aux_hidden_state_layer_ids), config.target_hidden_size)
        shape, largest = tuple(batch.aux.shape[1:]), int(batch.token_ids.max())
        if shape != wanted or largest >= num_tokens:
            raise ValueError(
                f"states of {shape} (aux layers, hidden size) and token ids up to {largest} do not fit a draft of {wanted} and "
                f"{num_tokens} tokens; rows {batch.sample_ids[0]} … are another target's"
            )

    def validate(self, held_out: list[PackedBatch]) -> dict[str, Any]:
        """Judge the held-out packs; weights whose acceptance length no earlier ones beat are the best."""
        judged = judge(self.trainer, held_out)
        length = judged["validation_acceptance_length"]
        if length >= self.progress.best_length:
            self.progress = replace(self.progress, best=trained_tensors(self.draft), best_length=length)
        return judged

    def save(self) -> None:
        """Write the log and the checkpoint."""
        self.log.flush()
        if self.trainer.ranks.rank == 0:
            progress = replace(self.progress, metrics=self.log.text())
            save_checkpoint(self.path, self.draft, self.trainer.optimizers, progress, self.schedule.digest)


def step_batches(
    rows: ShardRows, schedule: Schedule, done: int, ranks: DistContext, cfg: TrainConfig
) -> Generator[tuple[list[PackedBatch], float]]:
    """The parts of this process's packs of every step from `done` on, and the seconds that it waited for them.

    Where a step has no pack for it, it gets the step's first without its slots: every process must take part in every step.
    """
    mine = [schedule.packs_of(step, ranks.rank, ranks.size) for step in range(done, len(schedule.steps))]
    part_tokens = PART_TOKENS.get(ranks.device.type, cfg.pack_tokens)
    filled = [
        [
            part
            for pack in packs or schedule.steps[done + i][:1]
            for part in split_pack(pack, rows.lengths, part_tokens)
        ]
        for i, packs in enumerate(mine)
    ]
    flat = [part for step in filled for part in step]
    with closing(
        read_packs(rows, flat, cfg.pack_tokens, cfg.ttt_steps, pin=ranks.device.type == "cuda")
    ) as packs:
        for own, step in zip(mine, filled, strict=True):
            started = time.monotonic()
            batches = [next(packs) for _ in step]
            wait_s = time.monotonic() - started
            yield (batches if own else [batch.without_slots() for batch in batches]), wait_s


def write_draft(draft: Eagle3Draft, best: dict[str, Tensor], out: Path) -> None:
    """Write draft.safetensors (every parameter, float32, those in `best` from there) and draft.json, each whole or not at all."""
    tensors = {name: p.detach().cpu().contiguous() for name, p in draft.named_parameters()} | best
    with atomic_path(out / DRAFT_WEIGHTS) as part:
        save_file(tensors, part)
        (out / DRAFT_CONFIG).write_text(json.dumps(draft.config.to_dict(), indent=1))
