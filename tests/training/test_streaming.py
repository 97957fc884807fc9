"""Reading packs from local and remote shards: the same batches in the same order, whatever is cached.

The S3 store is moto's, inside this process; what does not concern S3 streams from file:// URLs.
"""

import hashlib
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3.shards.hidden_states import read_hidden_states
from eagle3.training import fetch
from eagle3.training.loader import ShardRows, read_packs
from eagle3.training.schedule import choose_validation
from tests.helpers.jobs import upload
from tests.helpers.streams import (
    PACK_TOKENS,
    STEPS,
    Watch,
    assert_same,
    chunk_bytes,
    chunks_of,
    file_urls,
    plan,
    read,
    two_groups_bytes,
)


def test_rows_are_known_from_the_manifests_alone(
    shard_dirs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = [row for d in shard_dirs for row in read_hidden_states(d)]
    monkeypatch.setattr(fetch, "ChunkReader", None)
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
    assert [b.sample_ids for b in batches] == [[rows.sample_ids[r] for r in pack.rows] for pack in packs]
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
    budget = two_groups_bytes(local, packs)
    assert budget < sum(chunk_bytes(local)) / 2
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
    budget = max(two_groups_bytes(local, packs), int(share * sum(chunk_bytes(local))))
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
        assert len(watch.urls) == len(chunks_of(local, packs))


def test_processes_with_parts_of_the_packs_read_what_one_reads(shard_dirs: list[str], tmp_path: Path) -> None:
    local = ShardRows(shard_dirs)
    packs = plan(local, epochs=2)
    whole = read(local, packs)
    for rank in range(3):
        rows = ShardRows(file_urls(shard_dirs), tmp_path / str(rank), two_groups_bytes(local, packs))
        assert_same(read(rows, packs[rank::3]), whole[rank::3])


def test_no_packs_need_nothing(shard_dirs: list[str]) -> None:
    assert read(ShardRows(shard_dirs), []) == []


def test_the_rows_that_validate_are_chosen_by_the_hash_of_their_id(shard_dirs: list[str]) -> None:
    names = ShardRows(shard_dirs).sample_ids
    by_hash = sorted(range(len(names)), key=lambda row: hashlib.sha256(names[row].encode()).digest())
    assert choose_validation(names, 5) == set(by_hash[:5])
