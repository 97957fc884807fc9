"""The training run: shards and vocabulary in, draft out; resumes from its own checkpoint.

make the schedule -> every step: read its packs, train_step, validate, keep the best, log, checkpoint
-> draft.safetensors
"""

import json
import logging
import shutil
import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from eagle3.config.training import DTYPE_ON, TrainConfig
from eagle3.draft.acceptance import AcceptanceCounts, walk_batch
from eagle3.draft.batch import PackedBatch
from eagle3.draft.config import DraftConfig
from eagle3.draft.loss import TargetHead
from eagle3.draft.model import Eagle3Draft, init_draft, load_exported
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
from eagle3.training.loader import Pack, ShardRows, read_packs
from eagle3.training.metrics import MetricLog
from eagle3.training.optimizer import set_learning_rate
from eagle3.training.schedule import Schedule, make_schedule, split_pack
from eagle3.training.step import PART_TOKENS, Objective, Trainer, judge, train_step
from eagle3.vocab import Vocab, load_vocab

logger = logging.getLogger(__name__)
DRAFT_WEIGHTS, DRAFT_CONFIG, METRICS = "draft.safetensors", "draft.json", "metrics.jsonl"
ALONE = DistContext(0, 1, torch.device("cpu"))


def train(
    job: TrainJob, dist: DistContext = ALONE, should_stop: Callable[[int], bool] = lambda step: False
) -> None:
    """Train a draft and write draft.safetensors, draft.json and metrics.jsonl into job.out_dir.

    Args:
        should_stop: called before each step with the number of steps done.

    Raises:
        Preempted: when should_stop returned True; a checkpoint has been saved.
        ValueError: on shards, vocabulary, target and initial draft that do not fit together.
        FloatingPointError: on a non-finite loss or gradient, before it reaches a checkpoint.
    """
    cfg = job.cfg
    out = Path(job.out_dir)
    cache_dir = out / f"chunks-{dist.rank}"  # stays after a kill: the next try uses the fetched chunks
    cache_dir.mkdir(parents=True, exist_ok=True)
    rows = ShardRows(job.shard_dirs, cache_dir, cfg.disk_budget_bytes // dist.size)
    for found in rows.layer_ids:
        if found != job.layer_ids:
            raise ValueError(
                f"the shards hold aux layers {found}, the job wants {job.layer_ids}; "
                "extract those or train on these"
            )
    dtype = compute_dtype(cfg, dist.device)
    vocab, target = load_vocab(job.vocab_path), load_target_tensors(job.target_dir, dtype)
    if len(vocab.t2d) != len(target.head):
        raise ValueError(
            f"{job.vocab_path} is for a target of {len(vocab.t2d)} tokens, {job.target_dir} has "
            f"{len(target.head)}; make it again"
        )
    draft = make_draft(job, target, vocab.target_ids).to(dist.device)
    head = TargetHead.from_target(target, vocab.target_ids, dist.device)
    trainer = Trainer(Objective(draft, head, dtype, cfg), dist, cfg)
    schedule = make_schedule(rows, cfg, identity_of(job, draft, vocab))
    TrainingRun(trainer, schedule, rows, out).run(should_stop, judge_first=bool(job.init_dir))
    shutil.rmtree(cache_dir)


def compute_dtype(cfg: TrainConfig, device: torch.device) -> torch.dtype:
    """The dtype that train.dtype means on a device."""
    name = DTYPE_ON[device.type] if cfg.dtype == "auto" else cfg.dtype
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def make_draft(job: TrainJob, target: TargetTensors, target_ids: Tensor) -> Eagle3Draft:
    """A new float32 draft for the target, or the one in job.init_dir with its own flags."""
    if not job.init_dir:
        config = DraftConfig.from_target(target.config, job.layer_ids, len(target_ids), job.cfg)
        return init_draft(config, target, target_ids, job.cfg)
    draft, ids = load_exported(job.init_dir, target.embedding)
    if not torch.equal(ids, target_ids):
        raise ValueError(
            f"{job.init_dir} and {job.vocab_path} have different draft vocabularies; an initial draft keeps "
            "its own, so make the vocabulary from it"
        )
    draft.config = replace(draft.config, target_architectures=target.config.get("architectures") or [])
    draft.lm_head.weight.requires_grad_(job.cfg.head != "target_frozen")
    return draft


def identity_of(job: TrainJob, draft: Eagle3Draft, vocab: Vocab) -> str:
    """Digest of draft shape, vocabulary and initial weights: the result depends on these too."""
    initial = ""
    if job.init_dir:
        initial = digest_of(*(p.detach().cpu().numpy().tobytes() for p in draft.parameters()))
    return digest_of(str(draft.config.to_dict()), vocab.digest, initial)


class TrainingRun:
    """Weights, optimizers, progress and log of a run, restored from the checkpoint in `out` if any."""

    def __init__(self, trainer: Trainer, schedule: Schedule, rows: ShardRows, out: Path) -> None:
        self.trainer = trainer
        self.cfg = trainer.cfg
        self.dist = trainer.dist
        self.schedule = schedule
        self.rows = rows
        self.out = out
        self.draft = trainer.objective.draft
        self.progress = Progress(0, {}, 0.0, b"")
        self.checkpoint = out / CHECKPOINT_NAME
        if self.checkpoint.exists():
            self.progress = load_checkpoint(self.checkpoint, self.draft, trainer.optimizers, schedule.digest)
        metrics_path = out / METRICS if self.dist.rank == 0 else None
        self.log = MetricLog(metrics_path, len(schedule.steps), self.progress.step, self.progress.metrics)
        self.held_out: list[PackedBatch] = []

    def run(self, should_stop: Callable[[int], bool], judge_first: bool) -> None:
        """Take the remaining steps, then write the draft; judge_first: the initial weights may be best."""
        done, total = self.progress.step, len(self.schedule.steps)
        message = "%d of %d steps done, %d rows, %d processes, %s"
        logger.info(message, done, total, len(self.rows.lengths), self.dist.size, self.dist.device)
        self._read_held_out()
        if judge_first and done == 0 and self.schedule.validation:
            length = self.validate()["validation_acceptance_length"]
            logger.info("the initial draft has a held-out acceptance length of %.3f", length)
        hidden = self.dist.rank > 0
        bar = tqdm(total=total, initial=done, desc="train_draft", unit="step", mininterval=2, disable=hidden)
        self.log.on_flush = lambda line: _show(bar, line)
        with bar, closing(step_batches(self.rows, self.schedule, done, self.trainer)) as packs_of_steps:
            for step in range(done, total):
                if self.dist.any_rank(should_stop(step)):
                    self._stop()
                # No variable holds the batches, so they are freed before the next ones are read.
                self.take_step(*next(packs_of_steps))
        if done < total and not self.log.num_supervised:
            raise ValueError(
                "no row has two adjacent supervised tokens within train.pack_tokens "
                f"{self.cfg.pack_tokens}, so no token was trained; raise it, or check the loss masks"
            )
        if self.dist.rank == 0:
            write_draft(self.draft, self.progress.best if self.cfg.keep == "best" else {}, self.out)

    def _read_held_out(self) -> None:
        packs = self.schedule.validation[self.dist.rank :: self.dist.size]
        self.held_out = list(read_packs(self.rows, packs, self.cfg.pack_tokens, self.cfg.ttt_steps))
        has_slots = self.dist.any_rank(any(len(batch.slots) for batch in self.held_out))
        if self.schedule.validation and not has_slots:
            message = "the %d held-out packs have no supervised slot, so they cannot rank weights"
            logger.warning(message, len(self.schedule.validation))

    def _stop(self) -> None:
        self.save()
        # Wait until the file is complete: torchrun kills the other ranks soon after the first exits.
        self.dist.any_rank(False)
        done, total = self.progress.step, len(self.schedule.steps)
        raise Preempted(f"stopped after {done} of {total} steps; run again to resume")

    def take_step(self, batches: list[PackedBatch], wait_s: float) -> None:
        """Train on the next step's packs, which took wait_s to arrive; validate, log and save when due."""
        for batch in batches:
            self._check_fits(batch)
        started = time.process_time()
        total = len(self.schedule.steps)
        rate = set_learning_rate(self.trainer.optimizers, self.progress.step, total, self.cfg)
        result = train_step(self.trainer, batches)
        done = self.progress.step + 1
        self.progress = replace(self.progress, step=done)
        values: dict[str, Any] = {name: value for name, value in vars(result).items() if name != "hits"}
        # On a GPU only when the log is flushed: reading the hits waits for the GPU.
        if self.log.is_due(done) or self.dist.device.type == "cpu":
            walks = [walk_batch(hits, batch) for hits, batch in zip(result.hits, batches, strict=True)]
            counts = sum(walks, AcceptanceCounts.empty(self.cfg.ttt_steps))
            values["acceptance_length"] = counts.acceptance_length
        if done in self.schedule.validate_after:
            values |= self.validate()
        values |= {"learning_rate": rate, "wait_s": wait_s, "cpu_s": round(time.process_time() - started, 4)}
        self.log.log_step(done, [row for batch in batches for row in batch.sample_ids], **values)
        if done % self.cfg.checkpoint_every == 0 or done == total:
            self.save()

    def _check_fits(self, batch: PackedBatch) -> None:
        """Refuse another target's states: on a GPU an unknown token id kills the process silently."""
        config = self.draft.config
        num_tokens = len(self.draft.get_buffer("embedding"))
        wanted = (len(config.eagle_aux_hidden_state_layer_ids), config.target_hidden_size)
        shape = tuple(batch.aux.shape[1:])
        largest = int(batch.token_ids.max())
        if shape != wanted or largest >= num_tokens:
            raise ValueError(
                f"states of {shape} (aux layers, hidden size) and token ids up to {largest} do not fit a "
                f"draft of {wanted} and {num_tokens} tokens; extract row {batch.sample_ids[0]} and its "
                "neighbours from this target"
            )

    def validate(self) -> dict[str, Any]:
        """Judge the held-out packs; keep the weights if no earlier ones have a longer acceptance length."""
        judged = judge(self.trainer, self.held_out)
        length = judged["validation_acceptance_length"]
        if length >= self.progress.best_length:
            self.progress = replace(self.progress, best=trained_tensors(self.draft), best_length=length)
        return judged

    def save(self) -> None:
        """Write the log and the checkpoint."""
        self.log.flush()
        if self.dist.rank == 0:
            progress = replace(self.progress, metrics=self.log.text())
            optimizers = self.trainer.optimizers
            save_checkpoint(self.checkpoint, self.draft, optimizers, progress, self.schedule.digest)


def _show(bar: "tqdm[Any]", line: dict[str, Any]) -> None:
    text = f"loss {line['loss']:.3f}, {line['supervised_per_s']:.0f} supervised tok/s"
    bar.set_postfix_str(text, refresh=False)
    bar.update(line["step"] - bar.n)


def step_batches(
    rows: ShardRows, schedule: Schedule, done: int, trainer: Trainer
) -> Generator[tuple[list[PackedBatch], float]]:
    """Yield the parts of this process's packs, and the seconds spent waiting, for every step from `done` on.

    Every process takes part in every step: if it has no pack, it gets the step's first pack without slots.
    """
    dist, cfg = trainer.dist, trainer.cfg
    part_tokens = PART_TOKENS.get(dist.device.type, cfg.pack_tokens)

    def parts_of(packs: list[Pack]) -> list[Pack]:
        return [part for pack in packs for part in split_pack(pack, rows.lengths, part_tokens)]

    own = [schedule.packs_of(step, dist.rank, dist.size) for step in range(done, len(schedule.steps))]
    parts = [parts_of(packs or step[:1]) for packs, step in zip(own, schedule.steps[done:], strict=True)]
    in_order = [part for step in parts for part in step]
    pin = dist.device.type == "cuda"
    with closing(read_packs(rows, in_order, cfg.pack_tokens, cfg.ttt_steps, pin)) as packs:
        for has_own, step in zip(own, parts, strict=True):
            started = time.monotonic()
            batches = [next(packs) for _ in step]
            wait_s = time.monotonic() - started
            yield (batches if has_own else [batch.without_slots() for batch in batches]), wait_s


def write_draft(draft: Eagle3Draft, best: dict[str, Tensor], out: Path) -> None:
    """Write draft.json and draft.safetensors: every parameter in float32, those in `best` from there."""
    tensors = {name: p.detach().cpu().contiguous() for name, p in draft.named_parameters()} | best
    with atomic_path(out / DRAFT_WEIGHTS) as part:
        save_file(tensors, part)
        (out / DRAFT_CONFIG).write_text(json.dumps(draft.config.to_dict(), indent=1))
