"""Source rows: JSONL files read line by line, with every fault named by file and line."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_rows(path: str | Path) -> Iterator[tuple[int, Row]]:
    """Stream a JSONL file: one JSON object a line, blank lines skipped; a byte-order mark and CRLF are fine.

    Args:
        path: a UTF-8 file.

    Yields:
        (line number from 1, row).

    Raises:
        ValueError: if the file cannot be opened, a line is not UTF-8, not JSON or not an object, or there is no row at all.
    """
    empty = True
    try:
        with open(path, "rb") as f:
            for number, line in enumerate(f, 1):
                text = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
                if text.strip():
                    empty = False
                    yield number, _parse_line(text, path, number)
    except OSError as e:
        raise ValueError(f"{path} cannot be read ({e.strerror}); give the path of a readable JSONL file") from e
    if empty:
        raise ValueError(f"{path} has no rows; write one JSON object with messages or a prompt on each line")


def _parse_line(line: bytes, path: str | Path, number: int) -> Row:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as e:
        raise ValueError(f"{path}, line {number}: byte {e.start + 1} is not UTF-8; save the file as UTF-8") from e
    except json.JSONDecodeError as e:
        raise ValueError(
            f"{path}, line {number}: not JSON ({e.msg} at column {e.colno}); write one whole JSON object on each line"
        ) from e
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{path}, line {number}: not readable JSON ({e}); correct the line or remove it") from e
    if not isinstance(row, dict):
        raise ValueError(
            f"{path}, line {number}: a row must be a JSON object, got {type(row).__name__}; write {{...}} with messages"
        )
    return row
