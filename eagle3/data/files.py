"""Rows of files: JSONL, JSON lists and Parquet, plain or compressed, here or at any URL that fsspec knows, in bounded memory.

What is wrong with one row becomes a Record without a row, which the caller counts; what is wrong with a whole
file is an error that names it. A file none of whose first MAX_FAULTS rows can be read is taken for one of
another format: an error too.
"""

import io
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import fsspec
from fsspec.utils import infer_compression

from eagle3.uris import redact

Row = dict[str, Any]
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".parquet": "parquet"}
COMPRESSIONS = (".gz", ".bz2", ".xz")
MAX_ROW_BYTES = 4 << 20  # about a million tokens: more than a context holds, and memory stays bounded
MAX_FAULTS = 100
BLOCK_SIZE = 1 << 20
MAX_BUFFER_CHARS = 64 << 20
PARQUET_ROWS = 256


@dataclass(frozen=True)
class Record:
    """One row of a source, or what is wrong with it.

    where: file and line or row from 1, free of directories. row: None where it cannot be read, for `reason`
    (a code to count by) and with `message` (for people). size: its bytes, 0 where unknown.
    """

    where: str
    row: Row | None
    reason: str = ""
    message: str = ""
    size: int = 0


class RepeatedKeyError(ValueError):
    """An object names a key twice, so that one value would be lost."""


def file_format(path: str) -> str | None:
    """`jsonl`, `json` or `parquet` by the file's name, compressed or not; None for another."""
    path = redact(path)
    for compression in COMPRESSIONS:
        path = path.removesuffix(compression)
    return next((kind for suffix, kind in FORMATS.items() if path.endswith(suffix)), None)


def read_file(path: str, name: str) -> Iterator[Record]:
    """Stream the rows of a file; blank lines, a byte-order mark and CRLF are fine.

    Args:
        path: file or URL; a name of no known format is read as JSONL.
        name: what records call the file.

    Raises:
        ValueError: if it cannot be opened, is cut off, has no row or none that can be read; names `path` and
            the remedy.
    """
    kind = file_format(path) or "jsonl"
    first_fault, num_faults, is_sound = "", 0, False
    try:
        with fsspec.open(path, "rb", compression=infer_compression(redact(path))) as file:
            for record in _read_open_file(file, kind, redact(path), name):
                if record.row is not None:
                    is_sound = True
                elif not is_sound:
                    first_fault = first_fault or f"{record.where.removeprefix(name)[2:]}: {record.message}"
                    num_faults += 1
                    if num_faults == MAX_FAULTS:
                        break
                yield record
    except (ConnectionError, TimeoutError):
        raise
    except (OSError, EOFError, zlib.error, ImportError) as e:
        reason = getattr(e, "strerror", None) or str(e)
        raise ValueError(
            f"{redact(path)} cannot be read ({reason}); give a whole, readable {kind} file"
        ) from e
    if not is_sound and first_fault:
        raise ValueError(
            f"{redact(path)}: none of the first {num_faults} rows can be read as {kind}; {first_fault}"
        )
    if not is_sound:
        raise ValueError(
            f"{redact(path)} has no rows; write one JSON object with messages or a prompt on each line"
        )


def _read_open_file(file: Any, kind: str, path: str, name: str) -> Iterator[Record]:
    if kind == "parquet":
        return _read_parquet(file, path, name)
    buffered = io.BufferedReader(file, BLOCK_SIZE)
    head = buffered.peek(BLOCK_SIZE).removeprefix(BYTE_ORDER_MARK).lstrip()
    # What is called .json may hold one object a line as well.
    if kind == "json" and head.startswith(b"["):
        return _read_json_list(buffered, path, name)
    return _read_json_lines(buffered, name)


def _read_json_lines(file: Any, name: str) -> Iterator[Record]:
    number = 0
    while line := file.readline(MAX_ROW_BYTES + 1):
        number += 1
        where, size = f"{name}, line {number}", len(line)
        if size > MAX_ROW_BYTES:
            while not line.endswith(b"\n") and (line := file.readline(BLOCK_SIZE)):
                size += len(line)
            yield _too_large(where, size)
            continue
        text = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
        if text.strip():
            yield _parse_line(text, where)


def _parse_line(line: bytes, where: str) -> Record:
    try:
        row = STRICT_DECODER.decode(line.decode())
    except UnicodeDecodeError as e:
        return Record(where, None, "not_utf8", f"byte {e.start + 1} is not UTF-8; save the file as UTF-8")
    except json.JSONDecodeError as e:
        message = f"not JSON ({e.msg} at column {e.colno}); write one whole JSON object on each line"
        return Record(where, None, "not_json", message)
    except RepeatedKeyError as e:
        return _repeated_key(where, e)
    except (ValueError, RecursionError) as e:
        return Record(where, None, "not_json", f"not readable JSON ({e}); correct the line or remove it")
    return _record_of(where, row, len(line))


def _read_json_list(file: Any, path: str, name: str) -> Iterator[Record]:
    """Rows of one JSON list, element by element: the text in hand grows only until the next element is whole."""
    text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape")
    buffer, at, number = text.read(BLOCK_SIZE), 0, 0
    at = buffer.index("[") + 1
    while True:
        while at < len(buffer) and buffer[at] in " \t\r\n,":
            at += 1
        if buffer.startswith("]", at):
            return
        where = f"{name}, row {number + 1}"
        try:
            record, end = _decode_element(buffer, at, where)
        except (ValueError, RecursionError) as e:
            more = text.read(max(BLOCK_SIZE, len(buffer) - at)) if len(buffer) - at < MAX_BUFFER_CHARS else ""
            if not more:
                raise ValueError(
                    f"{path}, row {number + 1}: not JSON ({getattr(e, 'msg', e)}); rows behind it cannot be found: correct it or "
                    "write one JSON object on each line of a .jsonl file"
                ) from e
            buffer, at = buffer[at:] + more, 0
            continue
        number, at = number + 1, end
        yield record


def _decode_element(buffer: str, at: int, where: str) -> tuple[Record, int]:
    try:
        row, end = STRICT_DECODER.raw_decode(buffer, at)
    except RepeatedKeyError as e:
        return _repeated_key(where, e), DECODER.raw_decode(buffer, at)[1]
    if end - at > MAX_ROW_BYTES:
        return _too_large(where, end - at), end
    try:
        buffer[at:end].encode()
    except UnicodeEncodeError as e:
        return Record(
            where,
            None,
            "not_utf8",
            f"character {e.start + 1} of the row is not UTF-8; save the file as UTF-8",
        ), end
    return _record_of(where, row, end - at), end


def _read_parquet(file: Any, path: str, name: str) -> Iterator[Record]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        for batch in pq.ParquetFile(file).iter_batches(PARQUET_ROWS):
            size = batch.nbytes // max(1, batch.num_rows)
            for i in range(batch.num_rows):
                number += 1
                where = f"{name}, row {number}"
                try:
                    (row,) = batch.slice(i, 1).to_pylist()
                except UnicodeDecodeError as e:
                    yield Record(
                        where, None, "not_utf8", f"{e.reason} at byte {e.start + 1}; write text as UTF-8"
                    )
                    continue
                yield Record(where, row, size=size)
    except pa.ArrowException as e:
        raise ValueError(f"{path} is not readable Parquet ({e}); write it again") from e


def _record_of(where: str, row: Any, size: int) -> Record:
    if not isinstance(row, dict):
        message = f"a row must be a JSON object, got {type(row).__name__}; write {{...}} with messages"
        return Record(where, None, "not_an_object", message)
    return Record(where, row, size=size)


def _too_large(where: str, size: int) -> Record:
    return Record(
        where,
        None,
        "row_too_large",
        f"{size:,} bytes, more than {MAX_ROW_BYTES:,}; cut the row into conversations",
    )


def _repeated_key(where: str, error: RepeatedKeyError) -> Record:
    return Record(where, None, "repeated_key", f"{error}; keep one of them")


def _unique(pairs: list[tuple[str, Any]]) -> Row:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [key for key, _ in pairs]
        raise RepeatedKeyError(
            f"an object has the key {next(k for k in names if names.count(k) > 1)!r} twice"
        )
    return row


DECODER = json.JSONDecoder()
STRICT_DECODER = json.JSONDecoder(object_pairs_hook=_unique)
