"""Index the rows of hidden-state shards from their manifests, and read packs in order."""

from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eagle3.draft.batch import PackedBatch, pack_rows
from eagle3.files import is_remote, read_bytes
from eagle3.shards.hidden_states import MANIFEST_NAME, HiddenStateRow, parse_manifest, read_manifest
from eagle3.training.fetch import Chunk, ChunkFiles, OpenChunks

PACKS_AHEAD = 2
MANIFEST_THREADS = 16


@dataclass(frozen=True)
class Pack:
    """Rows that are trained together.

    rows: row numbers, at least one. group: number of the group of chunks that holds the rows, counted over
    all epochs; the last pack of a group may also need chunks of the next.
    """

    rows: list[int]
    group: int


class ShardRows:
    """The rows of several hidden-state shards, numbered in shard order.

    lengths, sample_ids, chunk_of: tokens, id and chunk number of every row. digests: of every shard.
    supervised_tokens: of all shards. layer_ids: aux layers of each shard that names them.
    """

    def __init__(self, shard_dirs: list[str], cache_dir: Path | None = None, cache_bytes: int = 0) -> None:
        """Read the manifests of local directories or fsspec URLs.

        Raises:
            ValueError: on a shard that is unfinished, damaged or of another format version.
            OSError: if a store does not answer.
        """
        with ThreadPoolExecutor(MANIFEST_THREADS) as pool:
            manifests = list(pool.map(_read_any_manifest, shard_dirs))
        chunks = [
            Chunk(f"{shard_dir.rstrip('/')}/{entry['file']}", entry)
            for shard_dir, manifest in zip(shard_dirs, manifests, strict=True)
            for entry in manifest["chunks"]
        ]
        self.files = ChunkFiles(chunks, cache_dir, cache_bytes)
        self.digests: list[str] = [manifest["digest"] for manifest in manifests]
        self.supervised_tokens = sum(manifest["supervised_tokens"] for manifest in manifests)
        self.layer_ids: list[list[int]] = [
            manifest["info"]["layer_ids"] for manifest in manifests if "layer_ids" in manifest["info"]
        ]
        self.lengths: list[int] = [n for chunk in chunks for n in chunk.entry["lengths"]]
        self.sample_ids: list[str] = [i for chunk in chunks for i in chunk.entry["sample_ids"]]
        self.chunk_of = [number for number, chunk in enumerate(chunks) for _ in chunk.entry["lengths"]]
        self.row_in_chunk = [r for chunk in chunks for r in range(len(chunk.entry["lengths"]))]

    def chunks_of(self, packs: list[Pack]) -> dict[int, list[int]]:
        """Numbers of the chunks that the packs of each group need, in order of use."""
        needs: dict[int, dict[int, None]] = {}
        for pack in packs:
            needs.setdefault(pack.group, {}).update(dict.fromkeys(self.chunk_of[row] for row in pack.rows))
        return {group: list(chunks) for group, chunks in needs.items()}

    def check_budget(self, packs: list[Pack]) -> None:
        """Refuse a disk budget that does not hold every two consecutive groups of chunks."""
        needs = self.chunks_of(packs)
        pairs = [{*chunks, *needs.get(group + 1, [])} for group, chunks in needs.items()]
        needed = max(map(self.files.disk_bytes, pairs), default=0)
        if needed > self.files.cache_bytes:
            raise ValueError(
                f"two groups of chunks take {needed} bytes, but the disk budget of a process is "
                f"{self.files.cache_bytes}; lower train.shuffle_chunks or raise train.disk_budget_bytes"
            )

    def row(self, number: int, chunks: OpenChunks) -> HiddenStateRow:
        """Read a row; waits for its chunk."""
        return chunks.wait_for(self.chunk_of[number]).row(self.row_in_chunk[number])


def _read_any_manifest(shard_dir: str) -> dict[str, Any]:
    if not is_remote(shard_dir):
        return read_manifest(shard_dir)
    url = f"{shard_dir.rstrip('/')}/{MANIFEST_NAME}"
    return parse_manifest(read_bytes(url), url)


def cut_row(row: HiddenStateRow, max_tokens: int) -> HiddenStateRow:
    """Keep the first `max_tokens` tokens of a row; the new last token has no label and no last state."""
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


def read_packs(
    rows: ShardRows, packs: list[Pack], pack_tokens: int, num_steps: int, pin: bool = False
) -> Generator[PackedBatch]:
    """Read packs of ascending groups, with rows cut to pack_tokens and the slots of I = num_steps steps.

    Threads read the next PACKS_AHEAD packs while the caller uses the current one. Closing the generator ends
    them; fetched chunks stay. `pin` copies tensors into page-locked memory, for asynchronous copies to a GPU.

    Raises:
        ValueError: on a damaged chunk, when its first pack is due.
        OSError: if a store keeps failing.
    """

    def read(pack: Pack) -> PackedBatch:
        batch = pack_rows([cut_row(rows.row(number, chunks), pack_tokens) for number in pack.rows], num_steps)
        return batch.pin_memory() if pin else batch

    ahead: deque[tuple[int, Future[PackedBatch]]] = deque()

    def take() -> PackedBatch:
        group, batch = ahead.popleft()
        chunks.enter(group)
        return batch.result()

    with ExitStack() as stack:
        pool = ThreadPoolExecutor(PACKS_AHEAD, thread_name_prefix="read-packs")
        stack.callback(pool.shutdown, cancel_futures=True)
        # Entered last, so it ends first: ending the fetches ends the threads that wait for chunks.
        chunks = stack.enter_context(OpenChunks(rows.files, rows.chunks_of(packs)))
        for pack in packs:
            while ahead and (len(ahead) > PACKS_AHEAD or not chunks.covers(pack.group)):
                yield take()
            if not ahead:
                chunks.enter(pack.group)
            ahead.append((pack.group, pool.submit(read, pack)))
        while ahead:
            yield take()
