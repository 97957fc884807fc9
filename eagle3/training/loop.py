"""The training run: shards and vocabulary in, draft out; resumes from its own checkpoint.

One pack is one optimizer step. The loss of a step is the sum over TTT steps of weight · KL, divided by the
pack's supervised slots.
"""

import itertools
import json
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from eagle3.batch import PackedBatch
from eagle3.config import TrainConfig
from eagle3.draft.acceptance import AcceptanceCounts, walk_batch
from eagle3.draft.loss import TargetHead, unroll_loss
from eagle3.draft.model import DraftConfig, Eagle3Draft, init_draft
from eagle3.draft.ttt import find_hits, guess, unroll
from eagle3.shards import digest_of
from eagle3.target.weights import TargetTensors, load_target_tensors
from eagle3.training.checkpoint import CHECKPOINT_NAME, load_checkpoint, save_checkpoint
from eagle3.training.loader import ShardRows, plan_packs, read_packs
from eagle3.training.metrics import MetricLog, by_step
from eagle3.training.optimizer import learning_rate_factor, make_optimizers, set_learning_rate
from eagle3.vocab import load_vocab

logger = logging.getLogger(__name__)
DRAFT_WEIGHTS, DRAFT_CONFIG, METRICS = "draft.safetensors", "draft.json", "metrics.jsonl"


@dataclass(frozen=True)
class Plan:
    """What the run will do.

    packs: row numbers, one pack per optimizer step. epoch_ends: steps after which an epoch is over. validation: packs of rows
    that are never trained on. digest: identity of data and settings.
    """

    packs: list[list[int]]
    epoch_ends: list[int]
    validation: list[list[int]]
    digest: str


def make_plan(rows: ShardRows, cfg: TrainConfig, extra: str) -> Plan:
    """Plan every epoch's packs from the row lengths.

    Raises:
        ValueError: if no row is left to train on.
    """
    training, validating = rows.split(cfg.validation_rows)
    if not training:
        raise ValueError(f"{len(rows.lengths)} rows leave none to train on; add prompts or lower train.validation_rows")

    def plan(selected: list[int], epoch: int) -> list[list[int]]:
        packs = plan_packs(rows.lengths, rows.chunk_of, selected, cfg.pack_tokens, cfg.seed, epoch, cfg.shuffle_chunks)
        rows.check_budget(packs)
        return packs

    epochs = [plan(training, epoch) for epoch in range(cfg.epochs)]
    packs = [pack for epoch in epochs for pack in epoch]
    epoch_ends = list(itertools.accumulate(len(epoch) for epoch in epochs))
    validation = plan(validating, 0)
    identity = digest_of(cfg.model_dump_json(), extra, *rows.sample_ids, *map(str, rows.lengths))
    return Plan(packs, epoch_ends, validation, identity)


def train(
    shard_dirs: list[str],
    vocab_path: str,
    target_dir: str,
    cfg: TrainConfig,
    layer_ids: list[int],
    out_dir: str,
    stop_after: int | None = None,
) -> None:
    """Train a draft and write draft.safetensors, draft.json and metrics.jsonl into out_dir.

    Args:
        shard_dirs: hidden-state shards, in order.
        vocab_path: vocab.safetensors.
        target_dir: the target's files; only embedding, final norm and head are read.
        cfg: settings.
        layer_ids: aux layers of the shards, ascending.
        out_dir: also holds the checkpoint; a run that finds one there goes on from it.
        stop_after: end after this many optimizer steps with a checkpoint, as if preempted.

    Raises:
        ValueError: on shards, vocabulary and target that do not fit together.
        FloatingPointError: on a non-finite loss or gradient, before it reaches the weights; names the conversations of the pack.
    """
    device = torch.device("cuda" if cfg.device == "auto" and torch.cuda.is_available() else cfg.device.replace("auto", "cpu"))
    out = Path(out_dir)
    out.mkdir(parents=True, exist_ok=True)
    vocab = load_vocab(vocab_path)
    target = load_target_tensors(target_dir)
    target_ids = vocab.target_ids
    config = DraftConfig.from_target(target.config, layer_ids, len(target_ids), cfg)
    draft = init_draft(config, target, target_ids, cfg).to(device)
    head = _target_head(target, target_ids, device)
    optimizers = make_optimizers(draft, cfg)
    rows = ShardRows(shard_dirs)
    plan = make_plan(rows, cfg, json.dumps(config.to_dict()) + vocab.digest)
    checkpoint = out / CHECKPOINT_NAME
    done = load_checkpoint(checkpoint, draft, optimizers, plan.digest) if checkpoint.exists() else 0
    total = len(plan.packs)
    logger.info("training %d steps, %d done, %d rows, device %s", total, done, len(rows.lengths), device)
    with tqdm(total=total, initial=done, desc="train_draft", unit="step", mininterval=2) as bar:

        def show(line: dict[str, Any]) -> None:
            bar.set_postfix_str(f"loss {line['loss']:.3f}, {line['supervised_per_s']:.0f} supervised tok/s", refresh=False)
            bar.update(line["step"] - bar.n)

        log = MetricLog(out / METRICS, total, done, show)
        step_weights = torch.tensor(cfg.step_weights, device=device)
        waited = time.monotonic()
        for batch in read_packs(rows, plan.packs[done:], cfg.pack_tokens, cfg.ttt_steps):
            wait_s = time.monotonic() - waited
            set_learning_rate(optimizers, learning_rate_factor(done, total, cfg))
            figures = train_step(draft, batch.to(device), head, step_weights, optimizers, cfg.max_grad_norm)
            done += 1
            rate = next(iter(optimizers.values())).param_groups[0]["lr"]
            if done in plan.epoch_ends and plan.validation:
                figures["validation_acceptance_length"] = validate(draft, rows, plan, cfg, target_ids.to(device), device)
            log.add(done, **figures, learning_rate=rate, tokens=len(batch.token_ids), data_wait_s=round(wait_s, 4))
            if done % cfg.checkpoint_every == 0 or done in (total, stop_after):
                log.flush()
                save_checkpoint(checkpoint, draft, optimizers, done, plan.digest)
            if done == stop_after:
                return
            waited = time.monotonic()
    write_draft(draft, out)


def _target_head(target: TargetTensors, target_ids: Tensor, device: torch.device) -> TargetHead:
    rows = target.head[target_ids].to(device)
    return TargetHead(target.norm_weight.to(device), target.norm_eps, rows, target_ids.to(device))


def train_step(
    draft: Eagle3Draft,
    batch: PackedBatch,
    head: TargetHead,
    step_weights: Tensor,
    optimizers: dict[str, torch.optim.Optimizer],
    max_grad_norm: float,
) -> dict[str, Any]:
    """One optimizer step on one pack; returns its figures as tensors."""
    states = unroll(draft, batch)
    result = unroll_loss(states, draft.lm_head.weight, batch, head, step_weights, max(1, len(batch.slots)))
    for optimizer in optimizers.values():
        optimizer.zero_grad(set_to_none=True)
    result.loss.backward()
    trained = [p for p in draft.parameters() if p.requires_grad]
    norm = torch.nn.utils.clip_grad_norm_(trained, max_grad_norm)
    if not torch.isfinite(result.loss + norm):
        raise FloatingPointError(
            f"loss {result.loss.item()}, gradient norm {norm.item()} on conversations {batch.sample_ids}; look at their states"
        )
    for optimizer in optimizers.values():
        optimizer.step()
    hits = find_hits(result.argmax, batch)
    return {
        "loss": result.loss.detach(),
        "loss_by_step": result.per_step / batch.valid.sum(1).clamp(min=1),
        "accuracy_by_step": by_step(hits, batch.valid),
        "gradient_norm": norm,
        "supervised": len(batch.slots),
    }


@torch.no_grad()
def validate(
    draft: Eagle3Draft, rows: ShardRows, plan: Plan, cfg: TrainConfig, target_ids: Tensor, device: torch.device
) -> float:
    """Acceptance length on the validation conversations, by the walk over the teacher-forced unroll, k = ttt_steps."""
    counts = AcceptanceCounts.empty(cfg.ttt_steps)
    for batch in read_packs(rows, plan.validation, cfg.pack_tokens, cfg.ttt_steps):
        moved = batch.to(device)
        counts += walk_batch(find_hits(guess(draft, unroll(draft, moved), target_ids), moved).cpu(), batch)
    return counts.acceptance_length


def write_draft(draft: Eagle3Draft, out: Path) -> None:
    """Write draft.safetensors (every parameter, fp32) and draft.json."""
    tensors = {name: p.detach().cpu().contiguous() for name, p in draft.named_parameters()}
    save_file(tensors, out / DRAFT_WEIGHTS)
    (out / DRAFT_CONFIG).write_text(json.dumps(draft.config.to_dict(), indent=1))
