"""The packs of every optimizer step.

Their order is a pure function of row lengths, chunks, seed, epoch and `shuffle_chunks`: a resumed run sees
the same packs, with any number of processes. Chunks are shuffled and divided into groups, the rows of a group
are shuffled together, and a pack takes the longest row of a window that fits. Only the last pack of a group
continues in the next. The processes share the packs of a step.
"""

import hashlib
import itertools
import logging
from bisect import bisect, insort
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from eagle3.config.training import TrainConfig
from eagle3.files import digest_of
from eagle3.training.loader import Pack, ShardRows

logger = logging.getLogger(__name__)
WINDOW_ROWS = 256


@dataclass(frozen=True)
class Schedule:
    """All optimizer steps of a run.

    steps: packs of every step. validation: packs of held-out rows. validate_after: steps, counted from 1,
    after which they are judged. digest: of data and settings.
    """

    steps: list[list[Pack]]
    validation: list[Pack]
    validate_after: frozenset[int]
    digest: str

    def packs_of(self, step: int, rank: int, size: int) -> list[Pack]:
        """Packs of one process in a step (from 0); may be empty."""
        return self.steps[step][rank::size]


def make_schedule(rows: ShardRows, cfg: TrainConfig, identity: str) -> Schedule:
    """Plan every epoch; identity: loop.identity_of, for the digest.

    Raises:
        ValueError: if no row or no supervised token is left to train on, or the disk budget is too small.
    """
    training, validating = divide_rows(rows, cfg)

    def plan(chosen: list[int], epoch: int) -> list[Pack]:
        return plan_packs(
            rows.lengths, rows.chunk_of, chosen, cfg.pack_tokens, cfg.shuffle_chunks, cfg.seed, epoch
        )

    steps: list[list[Pack]] = []
    epoch_ends = set()
    for epoch in range(cfg.epochs):
        packs = plan(training, epoch)
        steps += [packs[a : a + cfg.packs_per_step] for a in range(0, len(packs), cfg.packs_per_step)]
        epoch_ends.add(len(steps))
    validation = plan(validating, 0)
    for packs in (list(itertools.chain(*steps)), validation):
        rows.check_budget(packs)
    every = cfg.validate_every
    validate_after = set(range(every, len(steps), every)) | {len(steps)} if every else epoch_ends
    order = (*rows.digests, *rows.sample_ids, *map(str, rows.lengths), *map(str, rows.chunk_of))
    digest = digest_of(cfg.settings_of_result().model_dump_json(), identity, *order)
    return Schedule(steps, validation, frozenset(validate_after if validation else ()), digest)


def divide_rows(rows: ShardRows, cfg: TrainConfig) -> tuple[list[int], list[int]]:
    """Numbers of the rows to train and to validate on; refuses shards that leave nothing to train."""
    if not rows.supervised_tokens:
        raise ValueError("no row of the shards has a supervised token to train on; check their loss masks")
    total = len(rows.lengths)
    validating = choose_validation(rows.sample_ids, min(cfg.validation_rows, total // 10))
    training = [row for row in range(total) if row not in validating]
    if not training:
        raise ValueError(f"{total} rows leave none to train on; add prompts or lower train.validation_rows")
    if cut := sum(rows.lengths[row] > cfg.pack_tokens for row in training):
        message = "%d of %d rows are longer than train.pack_tokens %d and are cut"
        logger.warning(message, cut, len(training), cfg.pack_tokens)
    if not validating and cfg.keep == "best":
        message = "train.keep best keeps the last weights: %d rows leave none to validate on"
        logger.warning(message, total)
    return training, sorted(validating)


def choose_validation(sample_ids: list[str], num_rows: int) -> set[int]:
    """Choose at most `num_rows` validation rows: those whose openings have the smallest hashes.

    An opening is the part of an id before the colon. Rows with the same opening stay together, so training
    never sees the beginning of a validation conversation. As the data grows, rows leave this choice but
    hardly ever join it.
    """
    openings: dict[str, list[int]] = {}
    for row, sample_id in enumerate(sample_ids):
        openings.setdefault(sample_id.partition(":")[0], []).append(row)
    held: set[int] = set()
    for opening in sorted(openings, key=lambda o: hashlib.sha256(o.encode()).digest()):
        if len(held) + len(openings[opening]) <= num_rows:
            held.update(openings[opening])
    return held


def plan_packs(
    lengths: list[int],
    chunk_of: list[int],
    rows: list[int],
    pack_tokens: int,
    shuffle_chunks: int,
    seed: int,
    epoch: int,
) -> list[Pack]:
    """Put each of `rows` into one pack of at most `pack_tokens` tokens, to which longer rows are cut.

    Args:
        lengths, chunk_of: tokens and chunk number of every row.
        shuffle_chunks: chunks in a group.

    Returns:
        Packs in the order of training.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    rows_of: dict[int, list[int]] = {}
    for row in rows:
        rows_of.setdefault(chunk_of[row], []).append(row)
    chunks = _shuffled(sorted(rows_of), generator)
    starts = range(0, len(chunks), shuffle_chunks)
    packs: list[Pack] = []
    open_pack: Pack | None = None
    for group, start in enumerate(starts, epoch * len(starts)):
        mixed = [row for chunk in chunks[start : start + shuffle_chunks] for row in rows_of[chunk]]
        begun = open_pack or Pack([], group)
        first, *others = fill_packs(begun.rows, _shuffled(mixed, generator), lengths, pack_tokens)
        *full, last = [Pack(first, begun.group), *(Pack(pack, group) for pack in others)]
        # The pack that two groups share comes between them: later it would keep the first group's chunks.
        shared = [full.pop(0)] if open_pack and full else []
        packs += shared + _shuffled(full, generator)
        open_pack = last
    return [*packs, open_pack] if open_pack else packs


def _shuffled(items: list[Any], generator: torch.Generator) -> list[Any]:
    return [items[i] for i in torch.randperm(len(items), generator=generator).tolist()]


def fill_packs(begun: list[int], rows: list[int], lengths: list[int], pack_tokens: int) -> list[list[int]]:
    """Fill packs with the longest fitting row of a window of WINDOW_ROWS; its oldest row opens a new pack.

    Args:
        begun: rows of the pack to continue, may be empty.
        rows: row numbers in the order in which they enter the window.

    Returns:
        Packs in the order of filling; the last may have room left.
    """
    packs = [begun]
    room = pack_tokens - sum(min(lengths[row], pack_tokens) for row in begun)
    # (tokens, -index, row), ascending: the last of the longest fitting rows is the oldest.
    window: list[tuple[int, int, int]] = []
    queue: deque[tuple[int, int, int]] = deque()
    taken: set[int] = set()
    coming = enumerate(rows)
    for _ in rows:
        for index, row in itertools.islice(coming, WINDOW_ROWS - len(window)):
            item = (min(lengths[row], pack_tokens), -index, row)
            insort(window, item)
            queue.append(item)
        at = bisect(window, (room, 1)) - 1
        if at < 0:
            packs.append([])
            room = pack_tokens
            while queue[0][2] in taken:
                taken.remove(queue.popleft()[2])
            at = bisect(window, queue[0]) - 1
        tokens, _, row = window.pop(at)
        taken.add(row)
        packs[-1].append(row)
        room -= tokens
    return packs


def split_pack(pack: Pack, lengths: list[int], part_tokens: int) -> list[Pack]:
    """Cut a pack between rows into parts of at most `part_tokens` tokens; a longer row is its own part."""
    parts: list[list[int]] = [[]]
    room = part_tokens
    for row in pack.rows:
        if parts[-1] and lengths[row] > room:
            parts.append([])
            room = part_tokens
        parts[-1].append(row)
        room -= lengths[row]
    return [Pack(part, pack.group) for part in parts]
