"""Chunk files on their way to the packs: two groups within a budget, checked once, reused, deleted when no
pack needs them.
"""

import time
from pathlib import Path

import pytest
from safetensors import safe_open

from eagle3.shards import hidden_states
from eagle3.training import loader
from eagle3.training.loader import ShardRows, read_packs
from tests.helpers.streams import (
    CHUNK_BYTES,
    PACK_TOKENS,
    STEPS,
    Watch,
    assert_same,
    chunk_bytes,
    chunks_of,
    file_urls,
    plan,
    read,
    threads_of_the_loader,
    two_groups_bytes,
)


def test_a_budget_below_two_groups_is_refused_before_anything_is_fetched(
    shard_dirs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = ShardRows(shard_dirs)
    local.check_budget(plan(local))
    packs = plan(local, epochs=2, shuffle_chunks=8)
    needed = two_groups_bytes(local, packs)
    watch = Watch(monkeypatch, tmp_path)
    ShardRows(file_urls(shard_dirs), tmp_path, needed).check_budget(packs)
    rows = ShardRows(file_urls(shard_dirs), tmp_path, needed - 1)
    message = f"two groups of chunks take {needed} bytes, .* is {needed - 1}; lower train.shuffle_chunks or"
    with pytest.raises(ValueError, match=message):
        rows.check_budget(packs)
    with pytest.raises(ValueError, match="remote shards need a cache directory"):
        ShardRows(file_urls(shard_dirs))
    assert watch.urls == []


def test_a_cached_chunk_is_reused_after_a_check_and_only_our_files_are_deleted(
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
    left_over = [tmp_path / f"{cached[0].name}.part", tmp_path / f"chunk-0000099-{'0' * 64}.safetensors"]
    for path in [*strangers, *left_over]:
        path.write_text("x")
    watch = Watch(monkeypatch, tmp_path)
    assert_same(read(ShardRows(urls, tmp_path, budget), packs), read(local, packs))
    assert sorted(watch.urls) == [f"{urls[0]}/{Path(chunk.path).name}" for chunk in local.files.chunks[:2]]
    assert sorted(tmp_path.iterdir()) == sorted([*cached, *strangers])


def test_chunks_over_the_budget_are_deleted_before_the_next_are_fetched(
    shard_dirs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local, urls = ShardRows(shard_dirs), file_urls(shard_dirs)
    packs, budget = plan(local), two_groups_bytes(local, plan(local))
    read(ShardRows(urls, tmp_path, sum(chunk_bytes(local))), packs)
    tail = packs[len(packs) // 2 :]
    watch = Watch(monkeypatch, tmp_path)
    assert_same(read(ShardRows(urls, tmp_path, budget), tail), read(local, tail))
    assert watch.most <= budget
    assert len(watch.urls) == len(chunks_of(local, tail)) - len(first_two_groups(local, tail))


def first_two_groups(rows: ShardRows, packs: list[loader.Pack]) -> set[int]:
    return chunks_of(rows, [pack for pack in packs if pack.group <= packs[0].group + 1])


def test_only_the_group_that_is_read_and_the_next_are_fetched(
    shard_dirs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(monkeypatch, tmp_path)
    rows = ShardRows(file_urls(shard_dirs), tmp_path, 10**9)
    packs = plan(rows)
    batches = read_packs(rows, packs, PACK_TOKENS, STEPS)
    next(batches)
    wanted = {rows.files.chunks[number].path for number in first_two_groups(rows, packs)}
    deadline = time.monotonic() + 10
    while set(watch.urls) != wanted and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    assert set(watch.urls) == wanted
    assert len(list(batches)) == len(packs) - 1


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
def test_a_chunk_is_checked_once_and_opened_once_in_each_epoch(
    shard_dirs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_remote: bool
) -> None:
    checked: list[str] = []
    opened: list[str] = []
    sha256 = hidden_states.file_sha256
    monkeypatch.setattr(hidden_states, "file_sha256", lambda path: checked.append(path) or sha256(path))
    monkeypatch.setattr(
        hidden_states, "safe_open", lambda path, framework: opened.append(path) or safe_open(path, framework)
    )
    rows = ShardRows(file_urls(shard_dirs) if is_remote else shard_dirs, tmp_path, 10**9)
    read(rows, plan(rows, epochs=3))
    count = len(chunk_bytes(rows))
    assert len(checked) == len(set(checked)) == count
    # Once more or less where a group of one epoch meets the same chunk in the next.
    assert 2 * count < len(opened) <= 3 * count
