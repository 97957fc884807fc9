"""read_file: formats, what is a row's fault and what is the file's."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eagle3.data import files
from eagle3.data.files import Record, file_format, read_file

ROWS = [{"a": "é"}, {"a": [1, {"b": None}]}, {"a": "x" * 3000}]


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def read(path: Path) -> list[Record]:
    return list(read_file(str(path), path.name))


def rows_of(path: Path) -> list[Any]:
    return [record.row for record in read(path)]


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def test_every_format_gives_the_same_rows(tmp_path: Path) -> None:
    as_list = json.dumps(ROWS, indent=1).encode()
    made = [
        write(tmp_path / "a.jsonl", lines(ROWS)),
        write(tmp_path / "b.jsonl.gz", gzip.compress(lines(ROWS))),
        write(tmp_path / "c.json", as_list),
        write(tmp_path / "d.json.gz", gzip.compress(b"\xef\xbb\xbf\n" + as_list)),
        write(tmp_path / "e.json", lines(ROWS)),
        write(tmp_path / "f.txt", lines(ROWS)),
    ]
    assert all(rows_of(path) == ROWS for path in made)
    plain = [{"text": "é", "turns": [{"role": "user", "n": 1}]}, {"text": None, "turns": []}]
    pq.write_table(pa.Table.from_pylist(plain), tmp_path / "g.parquet")
    assert rows_of(tmp_path / "g.parquet") == plain


def test_a_file_at_a_url_is_read_as_one_on_the_disk(tmp_path: Path) -> None:
    import fsspec

    with fsspec.open("memory://rows/a.jsonl.gz", "wb") as f:
        f.write(gzip.compress(lines(ROWS)))
    assert [r.row for r in read_file("memory://rows/a.jsonl.gz", "a.jsonl.gz")] == ROWS
    with pytest.raises(ValueError, match=r"memory://rows/gone\.jsonl cannot be read"):
        list(read_file("memory://rows/gone.jsonl", "gone.jsonl"))


def test_rows_keep_their_line_numbers_when_blank_lines_are_skipped(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"a": "\xc3\xa9"}\r\n\r\n   \r\n{"a": 2}')
    assert [(r.where, r.row) for r in read(path)] == [
        ("a.jsonl, line 1", {"a": "é"}),
        ("a.jsonl, line 4", {"a": 2}),
    ]


def test_line_separators_inside_strings_do_not_break_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"a": "x\u2028y\u0085z"}\n{"a": 2}\n'.encode())
    assert [r.where for r in read(path)] == ["a.jsonl, line 1", "a.jsonl, line 2"]


@pytest.mark.parametrize(
    ("line", "reason", "message"),
    [
        (b'{"prompt": "Hi"', "not_json", "column"),
        (b"[", "not_json", "one complete JSON object on each line"),
        (b'["Hi"]', "not_an_object", "must be a JSON object, got list"),
        (b"null", "not_an_object", "got NoneType"),
        (b'{"prompt": "\xff"}', "not_utf8", "byte 13 is not UTF-8"),
        (b"[" * 100_000, "not_json", "not readable JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not_json", "not readable JSON"),
        (b'{"m": [{"role": "user", "role": "tool"}]}', "repeated_key", "has the key 'role' twice"),
        (b'{"a": "' + b"x" * (50 << 20) + b'"}', "row_too_large", "52,428,810 bytes, more than 4,194,304"),
        (b'{"a": "' + b"x" * (4 << 20) + b'"}', "row_too_large", "bytes, more than"),
    ],
)
def test_a_bad_line_is_one_records_fault(tmp_path: Path, line: bytes, reason: str, message: str) -> None:
    path = write(tmp_path / "rows.jsonl", b'{"prompt": "Hello"}\n' + line + b'\n{"prompt": "Bye"}\n')
    first, bad, last = read(path)
    assert (first.row, last.row, last.where) == ({"prompt": "Hello"}, {"prompt": "Bye"}, "rows.jsonl, line 3")
    assert (bad.row, bad.reason, bad.where) == (None, reason, "rows.jsonl, line 2")
    assert message in bad.message


def test_a_bad_element_of_a_list_is_one_records_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_ROW_BYTES", 100)
    data = b'[{"a": 1}, ["x"], {"a": "\xff"}, {"a": 1, "a": 2}, {"a": "' + b"x" * 200 + b'"}, 7, {"a": 2}]'
    records = read(write(tmp_path / "a.json", data))
    assert [r.reason for r in records] == [
        "",
        "not_an_object",
        "not_utf8",
        "repeated_key",
        "row_too_large",
        "not_an_object",
        "",
    ]
    assert records[-1] == Record("a.json, row 7", {"a": 2}, size=8)


@pytest.mark.parametrize("size", [1, 2, 7, 64])
def test_a_list_reads_the_same_in_blocks_of_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    rows = [{"a": "]é}{[", "n": [1, 23]}, {"b": 4567}, {}]
    path = write(tmp_path / "a.json", json.dumps(rows, indent=2, ensure_ascii=False).encode() + b"\n")
    monkeypatch.setattr(files, "BLOCK_SIZE", size)
    assert rows_of(path) == rows


def test_a_bad_string_in_parquet_is_one_records_fault(tmp_path: Path) -> None:
    text = pa.array([b"one", b"\xff", b"three"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"prompt": text}), tmp_path / "a.parquet")
    assert [(r.row, r.reason) for r in read(tmp_path / "a.parquet")] == [
        ({"prompt": "one"}, ""),
        (None, "not_utf8"),
        ({"prompt": "three"}, ""),
    ]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        (
            "a.jsonl",
            b"prompt,response\nHi,Hello\n",
            "none of the first 2 rows can be read as jsonl; line 1: not JSON",
        ),
        (
            "a.jsonl",
            '{"prompt": "Hi"}\n'.encode("utf-16"),
            "none of the first 2 rows can be read as jsonl; line 1: byte 1 is not",
        ),
        ("a.jsonl", b"?\n" * 500, "none of the first 100 rows can be read"),
        ("a.json", b'[{"a": 1}, {"a": 2', "row 2: not JSON"),
        ("a.json", b'[{"a": 1}, {"a" 2}, {"a": 3}]', "row 2: not JSON"),
        ("a.json", b'[{"a": 1}', "row 2: not JSON"),
        ("a.json", b"[]", "has no rows"),
        ("a.parquet", b"PAR1 no PAR1", "is not readable Parquet"),
        ("a.jsonl.gz", gzip.compress(lines(ROWS), mtime=0)[:-12], "cannot be read (Compressed file ended"),
        ("a.jsonl.gz", lines(ROWS), "cannot be read (Not a gzipped file"),
        ("a.jsonl", b"", "has no rows; write one JSON object"),
        ("a.jsonl", b"\xef\xbb\xbf\r\n\n", "has no rows"),
    ],
)
def test_a_file_that_is_not_of_its_format_is_an_error_that_names_it(
    tmp_path: Path, name: str, data: bytes, message: str
) -> None:
    path = write(tmp_path / name, data)
    with pytest.raises(ValueError, match=re.escape(message)) as e:
        read(path)
    assert str(e.value).startswith(str(path))


def test_a_missing_file_is_named_with_its_remedy(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"gone\.jsonl cannot be read \(No such file.*give a complete, readable jsonl file"
    ):
        list(read_file(str(tmp_path / "gone.jsonl"), "gone.jsonl"))


def test_formats_go_by_the_name() -> None:
    names = {
        "a.jsonl": "jsonl",
        "a.ndjson.xz": "jsonl",
        "b/c.json.gz": "json",
        "x.parquet": "parquet",
        "a.csv": None,
    }
    assert {name: file_format(name) for name in names} == names
