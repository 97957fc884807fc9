"""What a run will do, from row lengths and settings alone: which packs every optimizer step trains, and when it validates.

The same for any number of processes: a step's packs are dealt out to them, and the sum over a step is that of all its packs.
"""

import logging
from dataclasses import dataclass

from eagle3.config.training import TrainConfig
from eagle3.files import digest_of
from eagle3.training.loader import ShardRows, count_cut, plan_packs

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """steps: packs (row numbers) of every optimizer step. validate_after: steps, from 1, after which the validation packs, rows
    never trained on, are judged. digest: identity of data and settings."""

    steps: list[list[list[int]]]
    validate_after: frozenset[int]
    validation: list[list[int]]
    digest: str

    def packs_of(self, step: int, rank: int, size: int) -> list[list[int]]:
        """Packs of one process in a step (from 0); empty where there are more processes than packs."""
        return self.steps[step][rank::size]


def make_plan(rows: ShardRows, cfg: TrainConfig, identity: str) -> Plan:
    """Plan every epoch.

    Args:
        identity: what else decides the result: draft, vocabulary, initial weights.

    Raises:
        ValueError: if no row or no supervised token is left to train on, or the disk budget does not hold the chunks of a group.
    """
    if not rows.supervised_tokens:
        raise ValueError(
            "no row of the shards has a supervised token, so nothing can be learnt; look at their loss masks"
        )
    training, validating = rows.split(cfg.validation_rows)
    if cut := count_cut(rows.lengths, training, cfg.pack_tokens):
        logger.warning(
            "%d of %d rows are longer than train.pack_tokens %d and are cut",
            cut,
            len(training),
            cfg.pack_tokens,
        )
    if not training:
        raise ValueError(
            f"{len(rows.lengths)} rows leave none to train on; add prompts or lower train.validation_rows"
        )
    steps: list[list[list[int]]] = []
    epoch_ends = set()
    for epoch in range(cfg.epochs):
        packs = plan_packs(
            rows.lengths, rows.chunk_of, training, cfg.pack_tokens, cfg.seed, epoch, cfg.shuffle_chunks
        )
        rows.check_budget(packs)
        steps += [packs[a : a + cfg.packs_per_step] for a in range(0, len(packs), cfg.packs_per_step)]
        epoch_ends.add(len(steps))
    every = cfg.validate_every
    validate_after = set(range(every, len(steps), every)) | {len(steps)} if every else epoch_ends
    validation = plan_packs(
        rows.lengths, rows.chunk_of, validating, cfg.pack_tokens, cfg.seed, 0, cfg.shuffle_chunks
    )
    if not validation and cfg.keep == "best":
        logger.warning(
            "train.keep best means the last weights here: %d rows leave none to validate on",
            len(rows.lengths),
        )
    order = (*rows.digests, *rows.sample_ids, *map(str, rows.lengths), *map(str, rows.chunk_of))
    digest = digest_of(cfg.settings_of_result().model_dump_json(), identity, *order)
    return Plan(steps, frozenset(validate_after if validation else ()), validation, digest)
