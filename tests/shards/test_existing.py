"""Existing shards by path and URL: read without their states, refused if they do not fit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.config.engine import ExtractConfig
from eagle3.shards.existing import find_hidden_states, find_token_shards, listing
from eagle3.shards.tokens import TokenRow, write_token_shard
from eagle3.shards.writer import HiddenStateWriter

TARGET = {"name": "org/model", "revision": "r1", "digest": "d1"}
INFO = {"target": "org/model", "target_revision": "r1", "target_digest": "d1", "layer_ids": [1, 2]}
ROWS = [
    TokenRow("a:1", "", [5, 6, 7], [False, True, True]),
    TokenRow("b:2", "", [1], [True]),
    TokenRow("c:3", "", [9, 0, 8, 2], [True, False, True, True]),
]
HELDOUT = [TokenRow("z:1", "heldout", [1], [False])]


def write_states(out: str, rows: list[TokenRow] = ROWS, **info: Any) -> None:
    """A shard of several chunks."""
    writer = HiddenStateWriter(out, rows, 2, 4, ExtractConfig(encoding="fp32", chunk_bytes=64), INFO | info)
    for i, row in enumerate(rows):
        writer.add(i, torch.ones(len(row.token_ids), 3, 4))
    writer.close()


def find_states(*uris: str, layer_ids: tuple[int, ...] = (1, 2), vocab_size: int = 10) -> Any:
    return find_hidden_states(uris, TARGET, list(layer_ids), vocab_size, HELDOUT)


def find_tokens(*uris: str, vocab_size: int = 10) -> Any:
    return find_token_shards(uris, TARGET, vocab_size, HELDOUT)


def test_the_rows_of_states_are_read_from_a_directory_and_from_a_url(tmp_path: Path, s3: Any) -> None:
    for uri in (str(tmp_path / "shard"), "s3://states/shard"):
        write_states(uri)
        (found,) = find_states(uri)
        assert found.rows == ROWS
        assert len(found.manifest["chunks"]) > 1


def test_a_directory_is_its_shards_by_name_and_a_listing_its_shards_in_order(tmp_path: Path, s3: Any) -> None:
    for root in (str(tmp_path / "all"), "s3://states/all"):
        write_states(f"{root}/b", ROWS[:1])
        write_states(f"{root}/a", ROWS[1:])
        assert [s.uri for s in find_states(root)] == [f"{root}/a", f"{root}/b"]
    text = listing("hidden_states", TARGET, [{"place": f"s3://states/all/{name}"} for name in "ba"])
    s3.pipe_file("states/list.json", text.encode())
    assert [s.uri for s in find_states("s3://states/list.json")] == ["s3://states/all/b", "s3://states/all/a"]


def test_token_shards_are_counted_and_known_to_wait_for_answers(tmp_path: Path, s3: Any) -> None:
    tools = json.dumps({"tools": [{"name": "f"}]})
    made = {
        "answered": [TokenRow("a:1", "x", [1, 2], [False, True])],
        "mixed": [TokenRow("b:1", "x", [1, 2], [False, True]), TokenRow("c:1", "x", [3], [False])],
        "tools": [TokenRow("d:1", "x", [3], [False], tools)],
    }
    for name, rows in made.items():
        write_token_shard(tmp_path / f"{name}.parquet", rows)
    write_token_shard(tmp_path / "heldout.parquet", HELDOUT)
    s3.put(f"{tmp_path}/", "states/tokens", recursive=True)
    for uri in (str(tmp_path), "s3://states/tokens"):
        found = find_tokens(uri)
        assert [(s.waits, s.is_tool_tasks) for s in found] == [(False, False), (True, False), (True, True)]
        assert [s.summary.rows for s in found] == [1, 2, 1]
        assert [s.uri for s in found] == [f"{uri}/{name}.parquet" for name in made]


@pytest.mark.parametrize(
    ("info", "settings", "complaint"),
    [
        (
            {"target_digest": "d2", "target_revision": "r2"},
            {},
            "revision r2, digest d2; this run's is org/model, revision r1",
        ),
        ({}, {"layer_ids": (1, 3)}, r"holds the aux layers \[1, 2\], this run wants \[1, 3\]"),
        ({}, {"vocab_size": 9}, "row c:3 needs token ids from 0 to 8"),
    ],
)
def test_states_of_another_run_are_refused(tmp_path: Path, info: Any, settings: Any, complaint: str) -> None:
    write_states(str(tmp_path / "shard"), **info)
    with pytest.raises(ValueError, match=complaint):
        find_states(str(tmp_path / "shard"), **settings)


def test_unfinished_damaged_and_repeated_states_are_refused(tmp_path: Path) -> None:
    for name in "abc":
        write_states(str(tmp_path / name))
    with pytest.raises(ValueError, match="are the same shard"):
        find_states(str(tmp_path / "a"), str(tmp_path / "b"))
    (tmp_path / "a/manifest.json").unlink()
    with pytest.raises(ValueError, match="the shard was not finished"):
        find_states(str(tmp_path / "a"))
    chunk = next((tmp_path / "b").glob("chunk-*"))
    data = chunk.read_bytes()
    for torn, complaint in (
        (data[:-1], "bytes expected"),
        (b"\xff" * 8 + data[8:], "its header has"),
        (b"", "bytes expected"),
    ):
        chunk.write_bytes(torn)
        with pytest.raises(ValueError, match=complaint):
            find_states(str(tmp_path / "b"))
    manifest = json.loads((tmp_path / "c/manifest.json").read_text())
    for name in ("../b/manifest.json", "/etc/passwd", "..", "chunk-00000-0000000.safetensors"):
        manifest["chunks"][0]["file"] = name
        (tmp_path / "c/manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(ValueError, match="no chunk is described by file"):
            find_states(str(tmp_path / "c"))


def test_a_row_that_begins_with_a_held_out_prompt_is_refused(tmp_path: Path) -> None:
    write_token_shard(tmp_path / "x.parquet", [TokenRow("z:9", "x", [1, 2], [False, True]), ROWS[0]])
    with pytest.raises(ValueError, match="1 of 2 rows begin with a held-out prompt"):
        find_tokens(str(tmp_path / "x.parquet"))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[", "is not a listing"),
        ("[]", "is not a listing"),
        (listing("token_shards", TARGET | {"digest": "d2"}, []), "was made for the target"),
        (listing("hidden_states", TARGET, []), "train_from_states takes it"),
    ],
)
def test_a_listing_that_does_not_fit_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "list.json").write_text(text)
    with pytest.raises(ValueError, match=complaint):
        find_tokens(str(tmp_path / "list.json"))


@pytest.mark.parametrize("uri", ["/nowhere", "/nowhere/x.parquet", "/nowhere/x.json", "s3://states/nowhere"])
def test_a_missing_shard_is_named(s3: Any, uri: str) -> None:
    with pytest.raises(ValueError, match=uri):
        find_tokens(uri)
