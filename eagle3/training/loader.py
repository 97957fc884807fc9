"""Which rows train together, in which order, and their reading: packs of whole rows, planned from lengths alone.

The order is a pure function of (row lengths, seed, epoch): rows are shuffled, and within windows of the shuffled order the
longest that fits goes next into the pack, so packs are nearly full and a resumed run sees the packs that it would have seen.
"""

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from eagle3.batch import PackedBatch, pack_rows
from eagle3.shards import HiddenStateReader, HiddenStateRow

WINDOW_ROWS = 256


def plan_packs(
    lengths: list[int], chunk_of, rows: list[int], pack_tokens: int, seed: int, epoch: int, shuffle_chunks: int = 1
) -> list[list[int]]:
    """Group rows into packs of at most `pack_tokens` tokens (longer rows count as cut to that).

    Args:
        lengths: tokens of every row.
        rows: row numbers that take part.
        seed, epoch: they alone decide the order.

    Returns:
        Packs of row numbers; every row of `rows` stands in exactly one.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = [rows[i] for i in torch.randperm(len(rows), generator=generator).tolist()]
    packs: list[list[int]] = []
    waiting, room = [], 0
    for position in range(len(order) + WINDOW_ROWS):
        if position < len(order):
            waiting.append(order[position])
        if position < WINDOW_ROWS - 1 or not waiting:
            continue
        fitting = [r for r in waiting if min(lengths[r], pack_tokens) <= room]
        if not fitting:
            packs.append([])
            room, fitting = pack_tokens, [waiting[0]]
        row = max(fitting, key=lambda r: lengths[r])
        waiting.remove(row)
        packs[-1].append(row)
        room -= min(lengths[row], pack_tokens)
    shuffled = torch.randperm(len(packs), generator=generator).tolist()
    return [packs[i] for i in shuffled]


def cut_row(row: HiddenStateRow, max_tokens: int) -> HiddenStateRow:
    """Keep the first `max_tokens` tokens of a row. The last kept token's label is gone, so its last state goes too."""
    if len(row.token_ids) <= max_tokens:
        return row
    kept = row.last_positions < max_tokens - 1
    return replace(
        row,
        token_ids=row.token_ids[:max_tokens],
        loss_mask=row.loss_mask[:max_tokens],
        aux=row.aux[:max_tokens],
        last=row.last[kept],
        last_positions=row.last_positions[kept],
    )


class ShardRows:
    """Random access to the rows of several hidden-state shards, memory-mapped, numbered in shard order."""

    def __init__(self, shard_dirs: list[str], cache_dir=None, cache_bytes=0) -> None:
        self.chunk_of = []
        self.readers = [HiddenStateReader(d) for d in shard_dirs]
        self.where = [(reader, r) for reader in self.readers for r in range(len(reader.lengths))]
        self.lengths = [reader.lengths[r] for reader, r in self.where]
        self.sample_ids = [reader.sample_ids[r] for reader, r in self.where]

    def __getitem__(self, row: int) -> HiddenStateRow:
        reader, r = self.where[row]
        return reader.row(r)

    def split(self, validation_rows: int) -> tuple[list[int], list[int]]:
        """(training rows, validation rows): the rows with the smallest content hash validate, at most a tenth of all."""
        wanted = min(validation_rows, len(self.where) // 10)
        ranked = sorted(range(len(self.where)), key=lambda r: hashlib.sha256(self.sample_ids[r].encode()).digest())
        held = set(ranked[:wanted])
        return [r for r in range(len(self.where)) if r not in held], sorted(held)


def read_packs(rows: ShardRows, packs: list[list[int]], pack_tokens: int, num_steps: int) -> Iterator[PackedBatch]:
    """Read packs in order, the next one in the background while the caller works on this one."""

    def read(pack: list[int]) -> PackedBatch:
        return pack_rows([cut_row(rows[r], pack_tokens) for r in pack], num_steps)

    with ThreadPoolExecutor(1, thread_name_prefix="read-packs") as pool:
        ahead = None
        for pack in packs:
            following = pool.submit(read, pack)
            if ahead is not None:
                yield ahead.result()
            ahead = following
        if ahead is not None:
            yield ahead.result()
