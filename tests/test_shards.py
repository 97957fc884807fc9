"""Both shard formats: what is written is what is read, digests know content only, and damage is named."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3.shards import (
    HiddenStateReader,
    HiddenStateWriter,
    TokenRow,
    digest_of,
    hidden_state_bytes,
    last_state_positions,
    read_hidden_states,
    read_manifest,
    read_token_shard,
    row_digest,
    summarise_rows,
    write_token_shard,
)

NUM_AUX, HIDDEN = 3, 5
# Odd sizes, one token, nothing supervised, everything supervised, two turns.
MASKS = ["0", "1", "0111011", "000", "11", "0110"]
INFO = {"target": "tiny", "layer_ids": [1, 2, 3]}


def token_rows(masks: list[str] = MASKS) -> list[TokenRow]:
    return [TokenRow(f"id-{i}", "train", [10 * i + p for p in range(len(m))], [c == "1" for c in m]) for i, m in enumerate(masks)]


def states_of(row: TokenRow, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(row.token_ids) + row.token_ids[0])
    return torch.randn(len(row.token_ids), NUM_AUX + 1, HIDDEN, generator=generator).to(dtype)


def write_states(
    shard_dir: Path, rows: list[TokenRow], dtype: str = "float32", chunk_bytes: int = 200, info: dict[str, Any] = INFO
) -> dict[str, Any]:
    writer = HiddenStateWriter(shard_dir, dtype, chunk_bytes, info)
    for row in rows:
        writer.add(row, states_of(row))
    return writer.close()


# Token shards


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
            st.lists(st.tuples(st.integers(0, 2**31 - 1), st.booleans()), max_size=9),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_token_rows_are_read_as_they_were_written(tmp_path_factory: pytest.TempPathFactory, drawn: list[Any]) -> None:
    rows = [TokenRow(name, name[::-1], [t for t, _ in pairs], [m for _, m in pairs]) for name, pairs in drawn]
    path = tmp_path_factory.mktemp("shard") / "a.parquet"
    summary = write_token_shard(path, rows)
    assert read_token_shard(path) == rows
    assert summary == summarise_rows(rows) == summarise_rows(read_token_shard(path))
    assert (summary.rows, summary.tokens) == (len(rows), sum(len(r.token_ids) for r in rows))
    assert summary.supervised_tokens == sum(sum(r.loss_mask) for r in rows)


def test_token_shard_digest_is_independent_of_path_and_run(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    digests = {write_token_shard(tmp_path / name, token_rows()).digest for name in ("a.parquet", "b/c.parquet", "a.parquet")}
    assert len(digests) == 1
    assert sorted(p.name for p in tmp_path.rglob("*.parquet*")) == ["a.parquet", "c.parquet"]


def test_every_part_of_a_row_and_the_order_of_rows_change_the_digest() -> None:
    base = [TokenRow("a", "s", [1, 2], [False, True]), TokenRow("b", "s", [3], [True])]
    changed = [
        [TokenRow("x", "s", [1, 2], [False, True]), base[1]],
        [TokenRow("a", "x", [1, 2], [False, True]), base[1]],
        [TokenRow("a", "s", [1, 9], [False, True]), base[1]],
        [TokenRow("a", "s", [1, 2], [True, True]), base[1]],
        base[::-1],
        base[:1],
    ]
    assert len({summarise_rows(rows).digest for rows in [base, *changed]}) == len(changed) + 1


def test_digests_do_not_run_parts_together() -> None:
    assert digest_of("ab", "c") != digest_of("a", "bc") != digest_of("abc")
    assert digest_of("a") == digest_of(b"a")
    assert row_digest(TokenRow("ab", "c", [], [])) != row_digest(TokenRow("a", "bc", [], []))


def test_ids_and_flags_that_do_not_pair_up_name_the_row() -> None:
    with pytest.raises(ValueError, match="row a: 2 token ids but 1 mask flags; they must pair up"):
        TokenRow("a", "s", [1, 2], [True])


def test_a_token_shard_without_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"at least one row, got none for .*a\.parquet; check what was dropped"):
        write_token_shard(tmp_path / "a.parquet", [])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("keep", [0, 3, 100, -200, -9, -1])
def test_a_truncated_token_shard_is_named(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "a.parquet"
    write_token_shard(path, token_rows())
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"a\.parquet is not a readable token shard .*; delete it and run again"):
        read_token_shard(path)


def test_a_damaged_token_shard_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_token_shard(path, token_rows())
    data = path.read_bytes()
    path.write_bytes(data[:4] + b"\xff" * 200 + data[204:])
    with pytest.raises(ValueError, match=r"a\.parquet is not a readable token shard"):
        read_token_shard(path)


def test_a_parquet_file_with_other_columns_is_named(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["Hi"]}), path)
    with pytest.raises(ValueError, match=r"a\.parquet is not a readable token shard"):
        read_token_shard(path)


# Hidden-state shards


@pytest.mark.parametrize(
    ("mask", "positions"), [("", []), ("0", []), ("1", []), ("11", [0]), ("0111011", [1, 2, 5]), ("000", []), ("10101", [])]
)
def test_last_states_are_kept_only_between_two_supervised_tokens(mask: str, positions: list[int]) -> None:
    assert last_state_positions(torch.tensor([c == "1" for c in mask], dtype=torch.bool)).tolist() == positions


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("chunk_bytes", "num_chunks"), [(1, len(MASKS)), (1 << 20, 1)])
def test_states_are_read_as_they_were_written(tmp_path: Path, dtype: str, chunk_bytes: int, num_chunks: int) -> None:
    rows = token_rows()
    manifest = write_states(tmp_path, rows, dtype, chunk_bytes)
    read = list(read_hidden_states(tmp_path))
    assert [r.sample_id for r in read] == [r.sample_id for r in rows]
    for row, back in zip(rows, read, strict=True):
        states = states_of(row, getattr(torch, dtype))
        assert back.token_ids.tolist() == row.token_ids
        assert back.loss_mask.tolist() == row.loss_mask
        assert back.last_positions.tolist() == last_state_positions(torch.tensor(row.loss_mask)).tolist()
        assert torch.equal(back.aux, states[:, :-1])
        assert torch.equal(back.last, states[back.last_positions, -1])
        assert (back.token_ids.dtype, back.loss_mask.dtype, back.last_positions.dtype) == (torch.int64, torch.bool, torch.int64)
        assert back.aux.dtype == back.last.dtype == getattr(torch, dtype)
    assert manifest == read_manifest(tmp_path)
    assert len(manifest["chunks"]) == num_chunks


def test_rows_can_be_read_in_any_order(tmp_path: Path) -> None:
    rows = token_rows()
    write_states(tmp_path, rows)
    reader = HiddenStateReader(tmp_path)
    assert len(reader.manifest["chunks"]) > 1
    assert reader.lengths == [len(r.token_ids) for r in rows]
    assert reader.sample_ids == [r.sample_id for r in rows]
    for index in (5, 0, 3, 3, 2):
        assert reader.row(index).token_ids.tolist() == rows[index].token_ids
        assert torch.equal(reader.row(index).aux, states_of(rows[index])[:, :-1])


def test_manifest_counts_what_the_chunks_hold(tmp_path: Path) -> None:
    rows = token_rows()
    manifest = write_states(tmp_path, rows)
    assert manifest["rows"] == len(rows)
    assert manifest["tokens"] == sum(len(r.token_ids) for r in rows)
    assert manifest["supervised_tokens"] == sum(sum(r.loss_mask) for r in rows)
    assert manifest["info"] == INFO
    assert manifest["bytes"] == sum(p.stat().st_size for p in tmp_path.glob("*.safetensors"))
    assert [n for c in manifest["chunks"] for n in c["lengths"]] == [len(r.token_ids) for r in rows]
    for chunk in manifest["chunks"]:
        data = (tmp_path / chunk["file"]).read_bytes()
        assert (chunk["bytes"], chunk["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([c["file"] for c in manifest["chunks"]] + ["manifest.json"])


def test_hidden_state_digest_depends_on_content_and_settings_not_on_path_or_chunks(tmp_path: Path) -> None:
    rows = token_rows()
    digest = write_states(tmp_path / "a", rows)["digest"]
    assert digest == write_states(tmp_path / "b", rows)["digest"] == write_states(tmp_path / "c", rows, chunk_bytes=1)["digest"]
    changed = [
        write_states(tmp_path / "d", rows[1:]),
        write_states(tmp_path / "e", rows[::-1]),
        write_states(tmp_path / "f", rows, dtype="bfloat16"),
        write_states(tmp_path / "g", rows, info={**INFO, "layer_ids": [1, 2, 4]}),
    ]
    assert len({digest, *(m["digest"] for m in changed)}) == 5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_size_is_estimated_from_above(tmp_path: Path, dtype: str) -> None:
    rows = token_rows(["0" * 40 + "1" * 60] * 7)
    manifest = write_states(tmp_path, rows, dtype, chunk_bytes=1 << 20)
    bound = hidden_state_bytes(manifest["tokens"], manifest["supervised_tokens"], NUM_AUX, HIDDEN, dtype)
    # 1 KiB for the one chunk's header, which the estimate leaves out.
    assert 0.9 * bound < manifest["bytes"] < bound + 1024


def test_an_unfinished_shard_is_no_shard(tmp_path: Path) -> None:
    writer = HiddenStateWriter(tmp_path, "float32", 1, INFO)
    writer.add(token_rows()[2], states_of(token_rows()[2]))
    assert list(tmp_path.glob("chunk-00000.safetensors"))
    with pytest.raises(
        ValueError, match=r"manifest\.json is missing: the shard was not finished; delete the directory and run again"
    ):
        list(read_hidden_states(tmp_path))


@pytest.mark.parametrize("text", ["", "{", "[]", "7", "{}", '{"format_version": '])
def test_a_broken_manifest_is_named(tmp_path: Path, text: str) -> None:
    write_states(tmp_path, token_rows())
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match=r"manifest\.json is not a manifest .*; delete the directory and run again"):
        HiddenStateReader(tmp_path)


@pytest.mark.parametrize("version", [1, 99])
def test_an_older_and_a_newer_format_version_are_named(tmp_path: Path, version: int) -> None:
    manifest = write_states(tmp_path, token_rows())
    for chunk in manifest["chunks"]:
        del chunk["lengths"], chunk["sha256"]
    (tmp_path / "manifest.json").write_text(json.dumps({**manifest, "format_version": version}))
    with pytest.raises(ValueError, match=rf"format version {version}, this reader reads 2; extract again or update eagle3"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"file": ".."}, "no chunk is described by file '..'"),
        ({"file": "/etc/passwd"}, "no chunk is described by file 'passwd'"),
        ({"sha256": "../../x"}, "no chunk is described by .* sha256 '../../x'"),
        ({"lengths": [1]}, "chunk-00000.safetensors has 1 lengths but 3 sample ids"),
    ],
)
def test_a_manifest_that_describes_no_chunk_is_named(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    manifest = write_states(tmp_path, token_rows())
    manifest["chunks"][0] |= changed
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=f"manifest.json is not a manifest .{message}.*; delete the directory and run again"):
        read_manifest(tmp_path)


def test_a_chunk_is_sought_only_in_its_shard(tmp_path: Path) -> None:
    manifest = write_states(tmp_path / "shard", token_rows())
    manifest["chunks"][0]["file"] = "../../chunk-00000.safetensors"
    (tmp_path / "shard" / "manifest.json").write_text(json.dumps(manifest))
    assert next(read_hidden_states(tmp_path / "shard")).sample_id == "id-0"


def test_a_missing_chunk_is_named(tmp_path: Path) -> None:
    write_states(tmp_path, token_rows())
    (tmp_path / "chunk-00001.safetensors").unlink()
    with pytest.raises(
        ValueError, match=r"chunk-00001\.safetensors: \d+ bytes expected, no file found; the shard .* is damaged: delete it"
    ):
        read_manifest(tmp_path)


@pytest.mark.parametrize("keep", [0, 7, -1])
def test_a_truncated_chunk_is_named(tmp_path: Path, keep: int) -> None:
    write_states(tmp_path, token_rows())
    path = tmp_path / "chunk-00000.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"chunk-00000\.safetensors: \d+ bytes expected, \d+ bytes found; the shard .* is dam"):
        HiddenStateReader(tmp_path)


@pytest.mark.parametrize("place", [0, 100, -1])
def test_a_corrupt_byte_is_named_when_its_chunk_is_first_read(tmp_path: Path, place: int) -> None:
    write_states(tmp_path, token_rows())
    path = tmp_path / "chunk-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    reader = HiddenStateReader(tmp_path)
    assert reader.row(0).sample_id == "id-0"
    sha256, found = reader.manifest["chunks"][1]["sha256"], hashlib.sha256(data).hexdigest()
    message = f"{path}: sha256 {sha256} expected, {found} found; the shard {tmp_path} is damaged: delete it and run again"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        reader.row(3)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_states_that_are_not_finite_in_the_storage_dtype_name_the_row(tmp_path: Path, value: float) -> None:
    states = states_of(token_rows()[2])
    states[3, 1, 2] = value
    with pytest.raises(ValueError, match="row id-2 has a zero or non-finite hidden state in float16"):
        HiddenStateWriter(tmp_path, "float16", 1, INFO).add(token_rows()[2], states)


def test_an_all_zero_state_names_the_row(tmp_path: Path) -> None:
    states = states_of(token_rows()[2])
    states[3, 1] = 0
    with pytest.raises(ValueError, match="row id-2 has a zero or non-finite hidden state"):
        HiddenStateWriter(tmp_path, "float32", 1, INFO).add(token_rows()[2], states)


def test_lost_states_name_the_row(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="row id-2: 7 tokens but 6 states; the engine lost some"):
        HiddenStateWriter(tmp_path, "float32", 1, INFO).add(token_rows()[2], states_of(token_rows()[2])[1:])


def test_a_hidden_state_shard_without_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a hidden-state shard needs at least one row"):
        HiddenStateWriter(tmp_path, "float32", 1, INFO).close()
    assert not (tmp_path / "manifest.json").exists()
