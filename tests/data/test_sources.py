"""read_rows: what is fine, and what is named by file, line and remedy."""

import re
from pathlib import Path

import pytest

from eagle3.data.sources import read_rows


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_rows_keep_their_line_numbers_when_blank_lines_are_skipped(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b'{"a": 1}\n\n   \n{"a": 2}')
    assert list(read_rows(path)) == [(1, {"a": 1}), (4, {"a": 2})]


def test_byte_order_mark_and_crlf_are_fine(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"a": "\xc3\xa9"}\r\n\r\n{"a": 2}\r\n')
    assert list(read_rows(path)) == [(1, {"a": "é"}), (3, {"a": 2})]


def test_line_separators_inside_strings_do_not_break_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"a": "x\u2028y\u0085z"}\n{"a": 2}\n'.encode())
    assert [n for n, _ in read_rows(path)] == [1, 2]


def test_rows_before_a_broken_line_are_streamed(tmp_path: Path) -> None:
    rows = read_rows(write(tmp_path / "a.jsonl", b'{"a": 1}\n{"a": \n'))
    assert next(rows) == (1, {"a": 1})
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2: not JSON"):
        next(rows)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"prompt": "Hi"', ["not JSON", "column", "one whole JSON object on each line"]),
        (b"[", ["not JSON", "one whole JSON object on each line"]),
        (b'["Hi"]', ["must be a JSON object, got list", "write {...}"]),
        (b'"Hi"', ["must be a JSON object, got str", "write {...}"]),
        (b"null", ["must be a JSON object, got NoneType"]),
        (b'{"prompt": "\xff"}', ["byte 13 is not UTF-8", "save the file as UTF-8"]),
        (b"[" * 100_000, ["not readable JSON", "correct the line or remove it"]),
        (b'{"a": ' + b"9" * 5000 + b"}", ["not readable JSON", "correct the line"]),
    ],
)
def test_a_bad_line_is_named_with_its_remedy(tmp_path: Path, line: bytes, said: list[str]) -> None:
    path = write(tmp_path / "rows.jsonl", b'{"prompt": "Hello"}\n' + line + b'\n{"prompt": "Bye"}\n')
    with pytest.raises(ValueError, match=re.escape(f"{path}, line 2: ")) as e:
        list(read_rows(path))
    for part in said:
        assert part in str(e.value)


@pytest.mark.parametrize("data", [b"", b"\n\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\r\n"])
def test_an_empty_file_is_an_error(tmp_path: Path, data: bytes) -> None:
    path = write(tmp_path / "rows.jsonl", data)
    with pytest.raises(ValueError, match=r"rows\.jsonl has no rows; write one JSON object"):
        list(read_rows(path))


def test_a_missing_file_is_named_with_its_remedy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gone\.jsonl cannot be read \(No such file.*give the path"):
        list(read_rows(tmp_path / "gone.jsonl"))
