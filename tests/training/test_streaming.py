"""Reading packs from local and remote shards: the same batches in the same order, whatever is cached.

The S3 store is moto's, inside this process; what does not concern S3 streams from file:// URLs.
"""

import hashlib
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from eagle3 import hidden_states
from eagle3.hidden_states import read_hidden_states
from eagle3.training import chunk_cache, loader
from eagle3.training.chunk_cache import Course
from eagle3.training.loader import ShardRows, read_packs
from tests.training.jobs import upload
from tests.training.streams import (
    CHUNK_BYTES,
    PACK_TOKENS,
    STEPS,
    assert_same,
    chunk_bytes,
    file_urls,
    plan,
    read,
    threads_of_the_loader,
)


def live_bytes(rows: ShardRows, packs: list[list[int]]) -> int:
    """What an epoch has in use at one time, counted pack by pack."""
    most = 0
    for place in range(len(packs)):
        before, after = ({rows.chunk_of[r] for pack in part for r in pack} for part in (packs[: place + 1], packs[place:]))
        most = max(most, sum(chunk_bytes(rows)[c] for c in before & after))
    return most


class Watch:
    """Counts fetches, and measures a directory at each and between them.

    reads_maps: looks for deleted files that this process still maps, too; the system takes milliseconds to list them.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cache_dir: Path, reads_maps: bool = False) -> None:
        self.urls: list[str] = []
        self.most = 0
        self.lost: list[str] = []
        self.dir, self.reads_maps = cache_dir, reads_maps
        self.lock = threading.Lock()
        fetch = chunk_cache.fetch

        def watched(chunk: Any, path: Path, stopped: threading.Event) -> None:
            self.measure()
            fetch(chunk, path, stopped)
            self.measure()
            with self.lock:
                self.urls.append(chunk.path)

        monkeypatch.setattr(chunk_cache, "fetch", watched)

    def measure(self) -> None:
        total = 0
        for path in self.dir.glob("*"):
            try:
                total += path.stat().st_size
            except FileNotFoundError:
                continue
        with self.lock:
            self.most = max(self.most, total)
            self.lost += deleted_but_mapped(self.dir) if self.reads_maps else []


def deleted_but_mapped(directory: Path) -> list[str]:
    """Files that are gone from a directory and still take disk space, where the system tells."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    return [line for line in lines if str(directory) in line and line.endswith("(deleted)")]


def test_rows_are_known_from_the_manifests_alone(shard_dirs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    stored = [row for d in shard_dirs for row in read_hidden_states(d)]
    monkeypatch.setattr(chunk_cache, "ChunkReader", None)
    rows = ShardRows(shard_dirs)
    assert rows.lengths == [len(row.token_ids) for row in stored]
    assert rows.sample_ids == [row.sample_id for row in stored]
    sizes = [p.stat().st_size for d in shard_dirs for p in sorted(Path(d).glob("*.safetensors"))]
    assert chunk_bytes(rows) == sizes
    assert sorted(set(rows.chunk_of)) == list(range(len(sizes)))
    assert rows.chunk_of == sorted(rows.chunk_of)


def test_packs_come_in_plan_order_with_the_rows_of_the_shards(shard_dirs: list[str]) -> None:
    stored = {row.sample_id: row for d in shard_dirs for row in read_hidden_states(d)}
    rows = ShardRows(shard_dirs)
    packs = plan(rows, epochs=2)
    batches = read(rows, packs)
    assert [b.sample_ids for b in batches] == [[rows.sample_ids[r] for r in pack] for pack in packs]
    for batch in batches:
        starts = batch.row_starts.tolist()
        for name, start, stop in zip(batch.sample_ids, starts[:-1], starts[1:], strict=True):
            assert torch.equal(batch.aux[start:stop], stored[name].aux[:PACK_TOKENS])
            assert torch.equal(batch.token_ids[start:stop], stored[name].token_ids[:PACK_TOKENS])


def test_s3_streams_what_the_local_disk_holds_within_a_budget_below_the_data(
    shard_dirs: list[str], s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = ShardRows(shard_dirs)
    packs = plan(local)
    budget = live_bytes(local, packs)
    assert budget < sum(chunk_bytes(local)) / 3
    urls = upload(s3, shard_dirs)
    rows = ShardRows(urls, tmp_path, budget)
    assert (rows.lengths, rows.sample_ids, rows.chunk_of) == (local.lengths, local.sample_ids, local.chunk_of)
    rows.check_budget(packs)
    watch = Watch(monkeypatch, tmp_path, reads_maps=True)
    batches = []
    for batch in read_packs(rows, packs, PACK_TOKENS, STEPS):
        watch.measure()
        batches.append(batch)
    assert_same(batches, read(local, packs))
    assert 0 < watch.most <= budget
    assert watch.lost == []
    assert len(watch.urls) == len(set(watch.urls)) == len(chunk_bytes(rows))
    tail = len(packs) // 2
    resumed = ShardRows(urls, tmp_path / "other", budget)
    assert_same(read(resumed, packs[tail:]), batches[tail:])


@settings(max_examples=10, deadline=None)
@given(
    share=st.floats(0.0, 1.2),
    shuffle_chunks=st.integers(1, 40),
    epochs=st.integers(1, 3),
    start=st.integers(0, 30),
    seed=st.integers(0, 2**32),
)
def test_neither_budget_nor_start_nor_timing_changes_what_is_read(
    shard_dirs: list[str],
    tmp_path_factory: pytest.TempPathFactory,
    share: float,
    shuffle_chunks: int,
    epochs: int,
    start: int,
    seed: int,
) -> None:
    local, cache_dir = ShardRows(shard_dirs), tmp_path_factory.mktemp("cache")
    packs = plan(local, epochs, shuffle_chunks)[start:]
    least = max(sum(chunk_bytes(local)[c] for c in local.chunks_of(pack)) for pack in packs)
    budget = max(least, int(share * sum(chunk_bytes(local))))
    rows = ShardRows(file_urls(shard_dirs), cache_dir, budget)
    with pytest.MonkeyPatch.context() as patch:
        watch = Watch(patch, cache_dir)
        expected = read(local, packs)
        delays = torch.rand(len(packs), generator=torch.Generator().manual_seed(seed)) * 0.004
        batches = []
        for batch, delay in zip(read_packs(rows, packs, PACK_TOKENS, STEPS), delays.tolist(), strict=True):
            time.sleep(delay)
            watch.measure()
            batches.append(batch)
    assert_same(batches, expected)
    assert watch.most <= budget
    if budget >= sum(chunk_bytes(local)):
        assert len(watch.urls) == len({c for pack in packs for c in local.chunks_of(pack)})


def test_processes_with_parts_of_the_packs_read_what_one_reads(shard_dirs: list[str], tmp_path: Path) -> None:
    local = ShardRows(shard_dirs)
    packs = plan(local, epochs=2)
    whole = read(local, packs)
    for rank in range(3):
        rows = ShardRows(file_urls(shard_dirs), tmp_path / str(rank), live_bytes(local, packs))
        assert_same(read(rows, packs[rank::3]), whole[rank::3])


def test_two_readers_share_one_budget(shard_dirs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = ShardRows(shard_dirs)
    packs = plan(local)
    budget = live_bytes(local, packs) + 12 * CHUNK_BYTES
    rows, watch = ShardRows(file_urls(shard_dirs), tmp_path, budget), Watch(monkeypatch, tmp_path)
    training, validating = [], []
    for batch in read_packs(rows, packs, PACK_TOKENS, STEPS):
        training.append(batch)
        if len(training) % 10 == 0:
            validating = read(rows, packs[-4:])
            watch.measure()
    assert_same(training, read(local, packs))
    assert_same(validating, read(local, packs[-4:]))
    assert watch.most <= budget
    one, other = (read_packs(rows, part, PACK_TOKENS, STEPS) for part in (packs, packs[::-1]))
    pairs = list(zip(one, other, strict=True))
    assert_same([b for _, b in pairs], [b for b, _ in pairs][::-1])


def test_a_budget_below_the_live_set_is_refused_before_anything_is_fetched(
    shard_dirs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = ShardRows(shard_dirs)
    local.check_budget(plan(local))
    packs = plan(local, shuffle_chunks=8)
    needed = live_bytes(local, packs)
    watch = Watch(monkeypatch, tmp_path)
    ShardRows(file_urls(shard_dirs), tmp_path, needed).check_budget(packs)
    rows = ShardRows(file_urls(shard_dirs), tmp_path, needed - 1)
    with pytest.raises(
        ValueError,
        match=f"in use at one time take {needed} bytes, the disk budget is {needed - 1}; lower train.shuffle_chunks or",
    ):
        rows.check_budget(packs)
    rows = ShardRows(file_urls(shard_dirs), tmp_path, 2 * CHUNK_BYTES)
    with pytest.raises(ValueError, match="chunks of one pack take .* bytes, the disk budget is 20000; raise train.disk_budget_b"):
        read(rows, packs)
    with pytest.raises(ValueError, match="remote shards need a directory"):
        ShardRows(file_urls(shard_dirs))
    assert watch.urls == []


def test_a_cached_chunk_is_taken_over_checked_and_only_our_files_go(
    shard_dirs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local, urls = ShardRows(shard_dirs), file_urls(shard_dirs)
    packs, budget = plan(local), sum(chunk_bytes(local))
    read(ShardRows(urls, tmp_path, budget), packs)
    cached = sorted(tmp_path.iterdir())
    assert len(cached) == len(chunk_bytes(local))
    cached[0].unlink()
    data = bytearray(cached[1].read_bytes())
    data[-1] ^= 1
    cached[1].write_bytes(data)
    strangers = [tmp_path / "notes.txt", tmp_path / "chunk-1.safetensors"]
    left_behind = [tmp_path / f"{cached[0].name}.part", tmp_path / f"chunk-0000099-{'0' * 64}.safetensors"]
    for path in [*strangers, *left_behind]:
        path.write_text("x")
    watch = Watch(monkeypatch, tmp_path)
    assert_same(read(ShardRows(urls, tmp_path, budget), packs), read(local, packs))
    assert sorted(watch.urls) == [f"{urls[0]}/{Path(chunk.path).name}" for chunk in local.cache.chunks[:2]]
    assert sorted(tmp_path.iterdir()) == sorted([*cached, *strangers])
    small = ShardRows(urls, tmp_path, budget // 2)
    watch.most = 0
    watch.measure()
    assert watch.most <= budget // 2 + 2
    assert_same(read(small, packs), read(local, packs))


def test_an_early_end_stops_all_threads_and_leaves_other_files(shard_dirs: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    rows = ShardRows(file_urls(shard_dirs), tmp_path, 12 * CHUNK_BYTES)
    batches = read_packs(rows, plan(rows), PACK_TOKENS, STEPS)
    next(batches)
    assert threads_of_the_loader()
    batches.close()
    assert not threads_of_the_loader()
    assert (tmp_path / "mine").exists()
    assert not list(tmp_path.glob("*.part"))
    assert len(read(rows, plan(rows))) == len(plan(rows))


def test_few_packs_are_read_ahead(shard_dirs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    made, pack_rows = [], loader.pack_rows
    monkeypatch.setattr(loader, "pack_rows", lambda *args: made.append(1) or pack_rows(*args))
    rows, taken = ShardRows(shard_dirs), 0
    for taken, _ in enumerate(read_packs(rows, plan(rows), PACK_TOKENS, STEPS), start=1):
        time.sleep(0.01)
        assert len(made) <= taken + loader.PACKS_AHEAD
    assert len(made) == taken


@pytest.mark.parametrize("is_remote", [True, False])
def test_a_chunk_is_checked_once_and_stays_open_only_while_it_is_needed(
    shard_dirs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_remote: bool
) -> None:
    monkeypatch.setattr(chunk_cache, "NEAR_PACKS", 3)
    checked: list[str] = []
    opened: list[str] = []
    sha256 = hidden_states.file_sha256
    monkeypatch.setattr(hidden_states, "file_sha256", lambda path: checked.append(path) or sha256(path))
    monkeypatch.setattr(hidden_states, "safe_open", lambda path, framework: opened.append(path) or safe_open(path, framework))
    rows = ShardRows(file_urls(shard_dirs) if is_remote else shard_dirs, tmp_path, 10**9)
    packs = plan(rows, epochs=3)
    for place, _ in enumerate(read_packs(rows, packs, PACK_TOKENS, STEPS)):
        near = {c for pack in packs[max(0, place - 1) : place + loader.PACKS_AHEAD + 3 + 3] for c in rows.chunks_of(pack)}
        assert is_remote or set(rows.cache.ready) <= near
    assert len(checked) == len(set(checked)) == len(chunk_bytes(rows))
    assert len(opened) > 2 * len(chunk_bytes(rows))


def test_local_chunks_are_checked_only_a_little_ahead(shard_dirs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_cache, "NEAR_PACKS", 5)
    rows = ShardRows(shard_dirs)
    packs = plan(rows)
    batches = read_packs(rows, packs, PACK_TOKENS, STEPS)
    next(batches)
    time.sleep(0.2)
    near = {c for pack in packs[: 1 + loader.PACKS_AHEAD + 1 + 5] for c in rows.chunks_of(pack)}
    assert set(rows.cache.ready) <= near
    assert len(list(batches)) == len(packs) - 1


def test_no_packs_need_nothing(shard_dirs: list[str]) -> None:
    assert read(ShardRows(shard_dirs), []) == []


def test_next_uses_are_those_of_a_slow_search() -> None:
    g = torch.Generator().manual_seed(0)
    needs = [sorted(set(torch.randint(6, (2,), generator=g).tolist())) for _ in range(40)]
    course = Course(needs)
    for pack in range(40):
        for chunk in range(7):
            slow = next((float(i - pack) for i in range(pack, 40) if chunk in needs[i]), float("inf"))
            assert course.distance(chunk) == slow
        missing = [c for c in range(6) if c % 2 == pack % 2]
        due = [course.distance(c) for c in missing if course.distance(c) < float("inf")]
        nearest = course.nearest(set(range(6)) - set(missing))
        assert (course.distance(nearest) if nearest is not None else None) == (min(due) if due else None)
        for chunk in set(range(6)) - set(missing):
            course.requeue(chunk)
        course.finish(pack)


def test_the_same_rows_validate_whichever_store_they_come_from(shard_dirs: list[str], tmp_path: Path) -> None:
    training, held = ShardRows(shard_dirs).split(5)
    assert (training, held) == ShardRows(file_urls(shard_dirs), tmp_path, 10**9).split(5)
    names = ShardRows(shard_dirs).sample_ids
    assert set(held) == set(sorted(range(len(names)), key=lambda r: hashlib.sha256(names[r].encode()).digest())[:5])
    assert sorted(training + held) == list(range(len(names)))
