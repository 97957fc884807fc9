"""The format of hidden states: rows are read as written, files are as described, and damage is named."""

import hashlib
import itertools
import json
import math
import re
import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3.shards import chunks, hidden_states
from eagle3.shards.encoding import STORED_DTYPE, decode, encode
from eagle3.shards.hidden_states import (
    ChunkReader,
    HiddenStateRow,
    last_state_positions,
    read_hidden_states,
    read_manifest,
)
from eagle3.shards.tokens import TokenRow
from tests.helpers.shard_files import MASKS, open_rows, states_of, token_rows, write_hidden_states

NUM_AUX, HIDDEN = 3, 5
INFO = {"target": "tiny", "layer_ids": [1, 2, 3]}
STORAGE = [(encoding, compression) for encoding in sorted(STORED_DTYPE) for compression in ("none", "zstd")]


def write(shard_dir: Path, rows: list[TokenRow], chunk_bytes: int = 400, **storage: Any) -> dict[str, Any]:
    return write_hidden_states(
        shard_dir, rows, [states_of(row, NUM_AUX, HIDDEN) for row in rows], chunk_bytes, INFO, **storage
    )


def assert_same(row: TokenRow, back: HiddenStateRow, encoding: str) -> None:
    """The row is as written, with its states rounded to the encoding."""
    positions = last_state_positions(torch.tensor(row.loss_mask))
    states = decode(*encode(states_of(row, NUM_AUX, HIDDEN), encoding))
    assert (back.sample_id, back.token_ids.tolist(), back.loss_mask.tolist()) == (
        row.sample_id,
        row.token_ids,
        row.loss_mask,
    )
    assert torch.equal(back.last_positions, positions)
    assert torch.equal(back.aux, states[:, :-1])
    assert torch.equal(back.last, states[positions, -1])
    assert (back.token_ids.dtype, back.loss_mask.dtype, back.last_positions.dtype) == (
        torch.int64,
        torch.bool,
        torch.int64,
    )
    assert (
        back.aux.dtype == back.last.dtype == (torch.bfloat16 if encoding == "fp8" else STORED_DTYPE[encoding])
    )


@pytest.mark.parametrize(
    ("mask", "positions"),
    [("", []), ("0", []), ("1", []), ("11", [0]), ("0111011", [1, 2, 5]), ("000", []), ("10101", [])],
)
def test_last_states_are_kept_only_between_two_supervised_tokens(mask: str, positions: list[int]) -> None:
    assert (
        last_state_positions(torch.tensor([c == "1" for c in mask], dtype=torch.bool)).tolist() == positions
    )


@pytest.mark.parametrize(("encoding", "compression"), STORAGE)
@pytest.mark.parametrize(("chunk_bytes", "num_chunks"), [(1, len(MASKS)), (1 << 20, 1)])
def test_states_are_read_as_they_were_written(
    tmp_path: Path, encoding: str, compression: str, chunk_bytes: int, num_chunks: int
) -> None:
    rows = token_rows()
    manifest = write(tmp_path, rows, chunk_bytes, encoding=encoding, compression=compression)
    for row, back in zip(rows, read_hidden_states(tmp_path), strict=True):
        assert_same(row, back, encoding)
    assert manifest == read_manifest(tmp_path)
    assert len(manifest["chunks"]) == num_chunks


@pytest.mark.parametrize(("encoding", "compression"), STORAGE)
def test_rows_can_be_read_in_any_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str, compression: str
) -> None:
    monkeypatch.setattr(chunks, "FRAME_BYTES", 300)
    rows = token_rows(MASKS * 3)
    manifest = write(tmp_path, rows, 1500, encoding=encoding, compression=compression)
    assert len(manifest["chunks"]) > 1
    read = open_rows(tmp_path)
    assert len(read) == len(rows)
    for index in (17, 0, 1, 5, 3, 3, 2, 9, 4, 8, 6, 7, 16, 15, 14, 13, 12, 11, 10):
        assert_same(rows[index], read[index](), encoding)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.text("01", min_size=1, max_size=9), min_size=1, max_size=12),
    st.sampled_from(STORAGE),
    st.integers(1, 6000),
    st.integers(1, 1500),
    st.randoms(use_true_random=False),
)
def test_any_rows_in_any_chunks_are_read_in_any_order(
    tmp_path_factory: pytest.TempPathFactory,
    masks: list[str],
    storage: tuple[str, str],
    chunk_bytes: int,
    frame_bytes: int,
    random: Any,
) -> None:
    rows, shard_dir = token_rows(masks), tmp_path_factory.mktemp("shard")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "FRAME_BYTES", frame_bytes)
        write(shard_dir, rows, chunk_bytes, encoding=storage[0], compression=storage[1])
    read = open_rows(shard_dir)
    assert len(read) == len(rows)
    order = 2 * list(range(len(rows)))
    random.shuffle(order)
    for index in order:
        assert_same(rows[index], read[index](), storage[0])


def test_a_huge_row_between_small_ones_has_a_frame_and_ends_its_chunk(tmp_path: Path) -> None:
    rows = token_rows(["1", "01", "011" * 400, "1", "0"])
    manifest = write(tmp_path, rows, chunk_bytes=4000, encoding="bf16", compression="zstd")
    assert [chunk["lengths"] for chunk in manifest["chunks"]] == [[1, 2, 1200], [1, 1]]
    for row, back in zip(rows, read_hidden_states(tmp_path), strict=True):
        assert_same(row, back, "bf16")


def test_rows_of_a_frame_read_in_order_are_decompressed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, token_rows(), 1 << 20, compression="zstd")
    calls = []
    decompress = hidden_states.decompress
    monkeypatch.setattr(hidden_states, "decompress", lambda *args: calls.append(1) or decompress(*args))
    assert len(list(read_hidden_states(tmp_path))) == len(MASKS)
    assert len(calls) == 2  # aux and last of the one frame


def bf16(data: bytes) -> list[float]:
    return [struct.unpack("<f", b"\0\0" + data[i : i + 2])[0] for i in range(0, len(data), 2)]


def e4m3(data: bytes) -> list[float]:
    exponents = [(byte >> 3) & 15 for byte in data]
    magnitudes = [
        ((b & 7) / 8 + (e > 0)) * 2.0 ** max(e - 7, -6) for b, e in zip(data, exponents, strict=True)
    ]
    return [math.copysign(m, -1 if b & 128 else 1) for m, b in zip(magnitudes, data, strict=True)]


@pytest.mark.parametrize(("encoding", "compression"), STORAGE)
def test_a_chunk_has_the_described_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str, compression: str
) -> None:
    """Read a chunk by the docstring of hidden_states.py and the descriptions of safetensors and zstd alone."""
    monkeypatch.setattr(chunks, "FRAME_BYTES", 300)
    rows = token_rows()
    manifest = write(tmp_path, rows, 1 << 20, encoding=encoding, compression=compression)
    data = (tmp_path / manifest["chunks"][0]["file"]).read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    about = json.loads(header.pop("__metadata__")["states"])
    assert about == {
        "encoding": encoding,
        "compression": compression,
        "num_aux": NUM_AUX,
        "hidden_size": HIDDEN,
    }
    blobs = {k: data[start + v["data_offsets"][0] : start + v["data_offsets"][1]] for k, v in header.items()}

    def numbers(name: str, code: str) -> list[int]:
        assert header[name]["dtype"] == {"q": "I64", "i": "I32", "?": "BOOL", "f": "F32"}[code]
        return [value for (value,) in struct.iter_unpack(f"<{code}", blobs[name])]

    offsets = numbers("row_offsets", "q")
    assert offsets == [sum(len(m) for m in MASKS[:i]) for i in range(len(MASKS) + 1)]
    assert numbers("token_ids", "i") == [t for row in rows for t in row.token_ids]
    mask = numbers("loss_mask", "?")
    assert mask == [m for row in rows for m in row.loss_mask]
    last = [q for a, b in itertools.pairwise(offsets) for q in range(a, b - 1) if mask[q] and mask[q + 1]]
    assert numbers("last_positions", "q") == last
    num_tokens = offsets[-1]
    width = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1}[encoding]
    parse = {"bf16": bf16, "fp8": e4m3}.get(encoding) or (
        lambda raw: [v for (v,) in struct.iter_unpack({"fp16": "<e", "fp32": "<f"}[encoding], raw)]
    )
    names = {"token_ids", "loss_mask", "row_offsets", "last_positions", "aux", "last"}
    if compression == "zstd":
        names |= {"frame_rows", "aux_frames", "last_frames"}
        frame_rows = numbers("frame_rows", "q")
        assert (frame_rows[0], frame_rows[-1], len(frame_rows) > 2) == (0, len(rows), True)
        for kind, per_row in (("aux", NUM_AUX * HIDDEN), ("last", HIDDEN)):
            assert (header[kind]["dtype"], header[kind]["shape"]) == ("U8", [len(blobs[kind])])
            ends, out = numbers(f"{kind}_frames", "q"), b""
            assert (ends[0], ends[-1], len(ends)) == (0, len(blobs[kind]), len(frame_rows))
            for f in range(len(frame_rows) - 1):
                a, b = offsets[frame_rows[f]], offsets[frame_rows[f + 1]]
                count = (b - a if kind == "aux" else sum(a <= q < b for q in last)) * per_row
                frame = blobs[kind][ends[f] : ends[f + 1]]
                planes = (
                    pa.Codec("zstd").decompress(frame, decompressed_size=count * width, asbytes=True)
                    if count
                    else b""
                )
                out += bytes(
                    planes[byte * count + element] for element in range(count) for byte in range(width)
                )
            blobs[kind] = out
    else:
        name = {"bf16": "BF16", "fp16": "F16", "fp32": "F32", "fp8": "F8_E4M3"}[encoding]
        assert (header["aux"]["dtype"], header["aux"]["shape"]) == (name, [num_tokens, NUM_AUX, HIDDEN])
        assert (header["last"]["dtype"], header["last"]["shape"]) == (name, [len(last), HIDDEN])
    values = {kind: parse(blobs[kind]) for kind in ("aux", "last")}
    if encoding == "fp8":
        names |= {"aux_scales", "last_scales"}
        for kind in values:
            scales = numbers(f"{kind}_scales", "f")
            assert all(math.frexp(scale)[0] == 0.5 for scale in scales)
            values[kind] = [v * scales[i // HIDDEN] for i, v in enumerate(values[kind])]
    assert set(header) == names
    expected = torch.cat([decode(*encode(states_of(row, NUM_AUX, HIDDEN), encoding)) for row in rows])
    assert values["aux"] == expected[:, :-1].flatten().tolist()
    assert values["last"] == expected[last, -1].flatten().tolist()


def test_the_manifest_counts_the_content_of_the_chunks(tmp_path: Path) -> None:
    rows = token_rows()
    manifest = write(tmp_path, rows, encoding="fp8", compression="zstd")
    assert len(manifest["chunks"]) > 1
    assert (manifest["encoding"], manifest["compression"], manifest["info"]) == ("fp8", "zstd", INFO)
    assert manifest["rows"] == len(rows)
    assert manifest["tokens"] == sum(len(r.token_ids) for r in rows)
    assert manifest["supervised_tokens"] == sum(sum(r.loss_mask) for r in rows)
    assert manifest["bytes"] == sum(p.stat().st_size for p in tmp_path.glob("*.safetensors"))
    assert [i for c in manifest["chunks"] for i in c["sample_ids"]] == [r.sample_id for r in rows]
    assert [n for c in manifest["chunks"] for n in c["lengths"]] == [len(r.token_ids) for r in rows]
    for number, chunk in enumerate(manifest["chunks"]):
        data = (tmp_path / chunk["file"]).read_bytes()
        assert (tmp_path / chunk["file"]).stat().st_mode & 0o777 == 0o644
        sha256 = hashlib.sha256(data).hexdigest()
        assert (chunk["bytes"], chunk["sha256"]) == (len(data), sha256)
        assert chunk["file"] == f"chunk-{number:05d}-{sha256[:8]}.safetensors"
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        [c["file"] for c in manifest["chunks"]] + ["manifest.json"]
    )


def test_an_unfinished_shard_is_refused(tmp_path: Path) -> None:
    write(tmp_path, token_rows())
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(
        ValueError, match=r"manifest\.json is missing: the shard was not finished; run its extraction again"
    ):
        list(read_hidden_states(tmp_path))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "7", "{}", '{"format_version": ', '{"format_version": 3}', "\0\0", "null"]
)
def test_a_broken_manifest_is_named(tmp_path: Path, text: str) -> None:
    write(tmp_path, token_rows())
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(
        ValueError, match=r"manifest\.json is not a manifest .*; delete the directory and run again"
    ):
        read_manifest(tmp_path)


@pytest.mark.parametrize("version", [1, 2, 4, 99])
def test_an_older_and_a_newer_format_version_are_named(tmp_path: Path, version: int) -> None:
    manifest = write(tmp_path, token_rows())
    for chunk in manifest["chunks"]:
        del chunk["lengths"], chunk["sha256"]
    (tmp_path / "manifest.json").write_text(json.dumps({**manifest, "format_version": version}))
    with pytest.raises(
        ValueError, match=rf"format version {version}, this reader reads 3; extract again or update eagle3"
    ):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"file": ".."}, "no chunk is described by file '..'"),
        ({"file": "/etc/passwd"}, "no chunk is described by file 'passwd'"),
        ({"file": "chunk-00000.safetensors"}, "no chunk is described by file 'chunk-00000.safetensors'"),
        ({"sha256": "../../x"}, "no chunk is described by .* sha256 '../../x'"),
        ({"bytes": -1}, "no chunk is described by .* bytes -1"),
        ({"bytes": None}, "NoneType"),
        ({"lengths": [1]}, r"chunk-00000-[0-9a-f]{8}\.safetensors has 1 lengths but 3 sample ids"),
        (
            {"lengths": [1, 0, 8]},
            r"chunk-00000-[0-9a-f]{8}\.safetensors must have rows of at least one token",
        ),
        ({"lengths": []}, "must have rows of at least one token"),
        ({"lengths": [1, 1, 8]}, "its chunks hold 6 rows and 19 tokens, its counts are 6 rows and 18 tokens"),
    ],
)
def test_a_manifest_with_a_wrong_entry_is_named(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    manifest = write(tmp_path, token_rows())
    manifest["chunks"][0] |= changed
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(
        ValueError, match=f"manifest.json is not a manifest .*{message}.*; delete the directory and run again"
    ):
        read_manifest(tmp_path)


def test_a_chunk_is_read_only_from_its_shard(tmp_path: Path) -> None:
    manifest = write(tmp_path / "shard", token_rows())
    manifest["chunks"][0]["file"] = f"../../{manifest['chunks'][0]['file']}"
    (tmp_path / "shard" / "manifest.json").write_text(json.dumps(manifest))
    assert next(read_hidden_states(tmp_path / "shard")).sample_id == "id-0"


def test_a_missing_chunk_is_named(tmp_path: Path) -> None:
    file = write(tmp_path, token_rows())["chunks"][1]["file"]
    (tmp_path / file).unlink()
    with pytest.raises(
        ValueError, match=rf"{file}: \d+ bytes expected, no file found; the shard .* is damaged: delete it"
    ):
        read_manifest(tmp_path)


@pytest.mark.parametrize("keep", [0, 7, -1])
def test_a_truncated_chunk_is_named(tmp_path: Path, keep: int) -> None:
    path = tmp_path / write(tmp_path, token_rows())["chunks"][0]["file"]
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(
        ValueError, match=rf"{path.name}: \d+ bytes expected, \d+ bytes found; the shard .* is damaged"
    ):
        read_manifest(tmp_path)


@pytest.mark.parametrize("offset", [0, 100, -1])
@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_a_corrupt_byte_is_named_when_its_chunk_is_first_read(
    tmp_path: Path, offset: int, compression: str
) -> None:
    manifest = write(tmp_path, token_rows(), compression=compression)
    path = tmp_path / manifest["chunks"][1]["file"]
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
    rows = read_hidden_states(tmp_path)
    for sample_id in manifest["chunks"][0]["sample_ids"]:
        assert next(rows).sample_id == sample_id
    sha256, found = manifest["chunks"][1]["sha256"], hashlib.sha256(data).hexdigest()
    remedy = f"the shard {tmp_path} is damaged: delete it and run again"
    message = f"{path}: sha256 {sha256} expected, {found} found; {remedy}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        next(rows)


def test_a_damaged_copy_is_named_by_its_original(tmp_path: Path) -> None:
    entry = write(tmp_path, token_rows())["chunks"][0]
    path = tmp_path / "copy"
    path.write_bytes((tmp_path / entry["file"]).read_bytes()[:-1] + b"\xff")
    with pytest.raises(
        ValueError, match="^s3://states/shard/x: sha256 .*; the shard s3://states/shard is damaged"
    ):
        ChunkReader(path, entry, name="s3://states/shard/x")
    assert ChunkReader(path, entry, is_checked=True).row(0).sample_id == "id-0"
