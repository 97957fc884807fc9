"""Which rows train together, in which order, and their reading: packs of whole rows, planned from the manifests alone.

The order is a pure function of row lengths, chunks, seed, epoch and `shuffle_chunks`; workers, processes and cache size do not
enter, so a resumed run sees the packs that it would have seen. Chunks are shuffled and taken a group at a time, the rows of a
group are shuffled together, and packs take the longest fitting row of a window. A group is packed to its last row, so at any time
only the chunks of one group and of one more pack are in use; just the last pack of a group goes on into the next.
"""

import hashlib
import itertools
from bisect import bisect, insort
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from eagle3.draft.batch import PackedBatch, pack_rows
from eagle3.files import is_remote, read_bytes
from eagle3.shards.hidden_states import MANIFEST_NAME, HiddenStateRow, parse_manifest, read_manifest
from eagle3.training.chunk_cache import ChunkCache, ReadSchedule
from eagle3.training.chunk_files import Chunk

WINDOW_ROWS = 256
PACKS_AHEAD = 2
MANIFEST_THREADS = 16


def plan_packs(
    lengths: list[int],
    chunk_of: list[int],
    rows: list[int],
    pack_tokens: int,
    seed: int,
    epoch: int,
    shuffle_chunks: int,
) -> list[list[int]]:
    """Group rows into packs of at most `pack_tokens` tokens (longer rows count as cut to that).

    Args:
        lengths: tokens of every row.
        chunk_of: number of every row's chunk.
        rows: row numbers that take part.
        pack_tokens: tokens in a pack.
        seed, epoch: they decide the order.
        shuffle_chunks: chunks whose rows are shuffled together.

    Returns:
        Packs of row numbers; every row of `rows` stands in exactly one.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    rows_of: dict[int, list[int]] = {}
    for row in rows:
        rows_of.setdefault(chunk_of[row], []).append(row)
    chunks = _shuffled(sorted(rows_of), generator)
    packs: list[list[int]] = []
    begun: list[int] = []
    for start in range(0, len(chunks), shuffle_chunks):
        group = [row for chunk in chunks[start : start + shuffle_chunks] for row in rows_of[chunk]]
        bridging = bool(begun)
        *full, begun = _fill(begun, _shuffled(group, generator), lengths, pack_tokens)
        # The pack that both groups share comes between them: elsewhere it would keep the chunks of the one in use for longer.
        bridge = [full.pop(0)] if bridging and full else []
        packs += bridge + _shuffled(full, generator)
    return [*packs, begun] if begun else packs


def _shuffled(items: list[Any], generator: torch.Generator) -> list[Any]:
    return [items[i] for i in torch.randperm(len(items), generator=generator).tolist()]


def _fill(begun: list[int], rows: list[int], lengths: list[int], pack_tokens: int) -> list[list[int]]:
    """Fill packs with the longest fitting of WINDOW_ROWS waiting rows; a new pack opens with the one that has waited longest.

    Args:
        begun: a pack to go on with, may be empty.
        rows: row numbers in the order in which they come to wait.

    Returns:
        Packs in the order of filling; the last has found no end yet.
    """
    packs = [begun]
    room = pack_tokens - sum(min(lengths[r], pack_tokens) for r in begun)
    # (tokens, minus the place in line, row), ascending: of the longest rows that fit, the last is the one that waited longest.
    waiting: list[tuple[int, int, int]] = []
    line: deque[tuple[int, int, int]] = deque()
    taken: set[int] = set()
    coming = enumerate(rows)
    for _ in rows:
        for place, row in itertools.islice(coming, WINDOW_ROWS - len(waiting)):
            item = (min(lengths[row], pack_tokens), -place, row)
            insort(waiting, item)
            line.append(item)
        at = bisect(waiting, (room, 1)) - 1
        if at < 0:
            packs.append([])
            room = pack_tokens
            while line[0][2] in taken:
                taken.remove(line.popleft()[2])
            at = bisect(waiting, line[0]) - 1
        tokens, _, row = waiting.pop(at)
        taken.add(row)
        packs[-1].append(row)
        room -= tokens
    return packs


def split_pack(pack: list[int], lengths: list[int], part_tokens: int) -> list[list[int]]:
    """Cut a pack between rows into parts of at most `part_tokens` tokens; a longer row is a part of its own.

    Args:
        pack: row numbers, at least one.
        lengths: tokens of every row.
    """
    parts: list[list[int]] = [[]]
    room = part_tokens
    for row in pack:
        if parts[-1] and lengths[row] > room:
            parts.append([])
            room = part_tokens
        parts[-1].append(row)
        room -= lengths[row]
    return parts


def count_cut(lengths: list[int], rows: list[int], pack_tokens: int) -> int:
    """How many of the rows are longer than a pack and lose their end."""
    return sum(lengths[row] > pack_tokens for row in rows)


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


def validation_split(sample_ids: list[str], num_rows: int) -> set[int]:
    """Choose the rows that validate, at most `num_rows`: those whose openings have the smallest hashes.

    Rows whose ids have one opening (the part before the colon, if there is one) stay together, so that training never sees the
    beginning of a conversation that validates. As the data grows, rows leave this choice but hardly ever join it.
    """
    openings: dict[str, list[int]] = {}
    for row, sample_id in enumerate(sample_ids):
        openings.setdefault(sample_id.partition(":")[0], []).append(row)
    held: set[int] = set()
    for opening in sorted(openings, key=lambda o: hashlib.sha256(o.encode()).digest()):
        if len(held) + len(openings[opening]) <= num_rows:
            held.update(openings[opening])
    return held


class ShardRows:
    """The rows of several hidden-state shards, numbered in shard order, known from the manifests; chunks are opened when needed.

    lengths: tokens of every row. sample_ids: their ids. chunk_of: the number of each row's chunk, over all shards. digests:
    the shards' own. supervised_tokens: over all shards. layer_ids: aux layers of each shard that names them.
    """

    def __init__(self, shard_dirs: list[str], cache_dir: Path | None = None, cache_bytes: int = 0) -> None:
        """Read the manifests.

        Args:
            shard_dirs: local directories, whose chunks are read in place, or fsspec URLs, whose chunks are fetched.
            cache_dir: where fetched chunks go; this process alone uses it.
            cache_bytes: the most that they may take there.

        Raises:
            ValueError: on a shard that is unfinished, damaged or of another format version.
            OSError: if a store does not answer.
        """
        with ThreadPoolExecutor(MANIFEST_THREADS) as pool:
            manifests = list(pool.map(_read_any_manifest, shard_dirs))
        shards = zip(shard_dirs, manifests, strict=True)
        chunks = [
            Chunk(f"{d.rstrip('/')}/{entry['file']}", entry)
            for d, manifest in shards
            for entry in manifest["chunks"]
        ]
        self.cache = ChunkCache(chunks, cache_dir, cache_bytes)
        self.digests: list[str] = [manifest["digest"] for manifest in manifests]
        self.supervised_tokens = sum(manifest["supervised_tokens"] for manifest in manifests)
        self.layer_ids: list[list[int]] = [
            manifest["info"]["layer_ids"] for manifest in manifests if "layer_ids" in manifest["info"]
        ]
        self.lengths: list[int] = [n for chunk in chunks for n in chunk.entry["lengths"]]
        self.sample_ids: list[str] = [i for chunk in chunks for i in chunk.entry["sample_ids"]]
        self.chunk_of = [number for number, chunk in enumerate(chunks) for _ in chunk.entry["lengths"]]
        self.row_in_chunk = [r for chunk in chunks for r in range(len(chunk.entry["lengths"]))]

    def split(self, validation_rows: int) -> tuple[list[int], list[int]]:
        """(training rows, validation rows): `validation_split` over all shards, at most a tenth of the rows."""
        held = validation_split(self.sample_ids, min(validation_rows, len(self.lengths) // 10))
        return [r for r in range(len(self.lengths)) if r not in held], sorted(held)

    def chunks_of(self, pack: list[int]) -> list[int]:
        """Numbers of the chunks that a pack needs, ascending."""
        return sorted({self.chunk_of[row] for row in pack})

    def check_budget(self, packs: list[list[int]]) -> None:
        """Check that each remote chunk is fetched once in one epoch: from its first use to its last it keeps its place on disk.

        Args:
            packs: packs of one epoch, in order.

        Raises:
            ValueError: if the chunks in use at one time exceed the disk budget.
        """
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for place, pack in enumerate(packs):
            for chunk in self.chunks_of(pack):
                first.setdefault(chunk, place)
                last[chunk] = place
        change = [0] * (len(packs) + 1)
        for chunk in first:
            change[first[chunk]] += self.cache.disk_bytes([chunk])
            change[last[chunk] + 1] -= self.cache.disk_bytes([chunk])
        needed = max(itertools.accumulate(change))
        if needed > self.cache.cache_bytes:
            raise ValueError(
                f"the chunks in use at one time take {needed} bytes, the disk budget is {self.cache.cache_bytes}; "
                "lower train.shuffle_chunks or raise train.disk_budget_bytes"
            )


def _read_any_manifest(shard_dir: str) -> dict[str, Any]:
    if not is_remote(shard_dir):
        return read_manifest(shard_dir)
    url = f"{shard_dir.rstrip('/')}/{MANIFEST_NAME}"
    return parse_manifest(read_bytes(url), url)


def read_packs(
    rows: ShardRows, packs: list[list[int]], pack_tokens: int, num_steps: int, pin: bool = False
) -> Generator[PackedBatch]:
    """Read packs in order, the next PACKS_AHEAD in the background while the caller works on this one.

    Remote chunks are fetched ahead as far as the budget allows; whether it serves a whole epoch is for `ShardRows.check_budget`
    to say. Closing the iterator ends all threads; fetched chunks stay.

    Args:
        rows: where the rows are.
        packs: row numbers, at least one a pack.
        pack_tokens: longer rows are cut to this.
        num_steps: I.
        pin: put the tensors into page-locked memory, from which they go to a GPU without waiting.

    Raises:
        ValueError: on a damaged chunk, or a disk budget that does not hold the chunks of one pack.
        OSError: if a store does not answer.
    """

    def read(course: ReadSchedule, place: int) -> PackedBatch:
        with rows.cache.hold(course, place) as chunks:
            batch = pack_rows(
                [
                    cut_row(chunks[rows.chunk_of[r]].row(rows.row_in_chunk[r]), pack_tokens)
                    for r in packs[place]
                ],
                num_steps,
            )
        return batch.pin_memory() if pin else batch

    pool = ThreadPoolExecutor(PACKS_AHEAD, thread_name_prefix="read-packs")
    ahead: deque[Future[PackedBatch]] = deque()
    try:
        with rows.cache.follow([rows.chunks_of(pack) for pack in packs]) as course:
            for place in range(len(packs)):
                ahead.append(pool.submit(read, course, place))
                if len(ahead) > PACKS_AHEAD:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
