"""Chunk files on their way to the packs: fetched within a budget, checked once, taken over, deleted when nothing needs them."""

import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from eagle3.shards import hidden_states
from eagle3.training import chunk_cache, loader
from eagle3.training.chunk_cache import ReadSchedule
from eagle3.training.loader import ShardRows, read_packs
from tests.helpers.streams import (
    CHUNK_BYTES,
    PACK_TOKENS,
    STEPS,
    Watch,
    assert_same,
    chunk_bytes,
    file_urls,
    live_bytes,
    plan,
    read,
    threads_of_the_loader,
)


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
    with pytest.raises(
        ValueError,
        match="chunks of one pack take .* bytes, the disk budget is 20000; raise train.disk_budget_b",
    ):
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
    monkeypatch.setattr(
        hidden_states, "safe_open", lambda path, framework: opened.append(path) or safe_open(path, framework)
    )
    rows = ShardRows(file_urls(shard_dirs) if is_remote else shard_dirs, tmp_path, 10**9)
    packs = plan(rows, epochs=3)
    for place, _ in enumerate(read_packs(rows, packs, PACK_TOKENS, STEPS)):
        near = {
            c
            for pack in packs[max(0, place - 1) : place + loader.PACKS_AHEAD + 3 + 3]
            for c in rows.chunks_of(pack)
        }
        assert is_remote or set(rows.cache.ready) <= near
    assert len(checked) == len(set(checked)) == len(chunk_bytes(rows))
    assert len(opened) > 2 * len(chunk_bytes(rows))


def test_local_chunks_are_checked_only_a_little_ahead(
    shard_dirs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_cache, "NEAR_PACKS", 5)
    rows = ShardRows(shard_dirs)
    packs = plan(rows)
    batches = read_packs(rows, packs, PACK_TOKENS, STEPS)
    next(batches)
    time.sleep(0.2)
    near = {c for pack in packs[: 1 + loader.PACKS_AHEAD + 1 + 5] for c in rows.chunks_of(pack)}
    assert set(rows.cache.ready) <= near
    assert len(list(batches)) == len(packs) - 1


def test_next_uses_are_those_of_a_slow_search() -> None:
    g = torch.Generator().manual_seed(0)
    needs = [sorted(set(torch.randint(6, (2,), generator=g).tolist())) for _ in range(40)]
    course = ReadSchedule(needs)
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
