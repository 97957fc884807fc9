"""Stream the rows of a file by path or URL: JSONL, a JSON list or Parquet, plain or compressed.

Memory is bounded. A row that cannot be read becomes a Record without a row, which the caller counts. A file
that cannot be read is an error, and so is a file whose first MAX_FAULTS rows cannot be read.
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
MAX_ROW_BYTES = 4 << 20  # about a million tokens, more than a context holds
MAX_FAULTS = 100
MAX_BUFFER_CHARS = 64 << 20
BLOCK_SIZE = 1 << 20
PARQUET_ROWS = 256


@dataclass(frozen=True)
class Record:
    """One row of a source.

    where: file name, and line or row from 1. row: None if it cannot be read. reason, message: why, as in
    BadRow. size: its bytes, 0 if unknown.
    """

    where: str
    row: Row | None
    reason: str = ""
    message: str = ""
    size: int = 0


class RepeatedKeyError(ValueError):
    """An object has a key twice, so the decoder would drop a value."""


def file_format(path: str) -> str | None:
    """`jsonl`, `json` or `parquet` by the file's suffix, compressed or not; None for any other suffix."""
    path = redact(path)
    for compression in COMPRESSIONS:
        path = path.removesuffix(compression)
    return next((kind for suffix, kind in FORMATS.items() if path.endswith(suffix)), None)


def read_file(uri: str, name: str) -> Iterator[Record]:
    """Stream the rows of a file, which records call `name`. A file without a known suffix is read as JSONL.

    Raises:
        ValueError: if the file cannot be opened, is truncated, or has no row that can be read.
    """
    kind = file_format(uri) or "jsonl"
    path = redact(uri)
    first_fault = ""
    num_faults = 0
    has_row = False
    try:
        with fsspec.open(uri, "rb", compression=infer_compression(path)) as file:
            for record in _read_open_file(file, kind, path, name):
                has_row = has_row or record.row is not None
                if not has_row:
                    first_fault = first_fault or f"{record.where.removeprefix(name)[2:]}: {record.message}"
                    num_faults += 1
                    if num_faults == MAX_FAULTS:
                        break
                yield record
    except (ConnectionError, TimeoutError):
        raise
    except (OSError, EOFError, zlib.error, ImportError) as e:
        reason = getattr(e, "strerror", None) or e
        raise ValueError(f"{path} cannot be read ({reason}); give a complete, readable {kind} file") from e
    if not has_row and num_faults:
        raise ValueError(f"{path}: none of the first {num_faults} rows can be read as {kind}; {first_fault}")
    if not has_row:
        raise ValueError(f"{path} has no rows; write one JSON object with messages or a prompt on each line")


def _read_open_file(file: Any, kind: str, path: str, name: str) -> Iterator[Record]:
    if kind == "parquet":
        return _read_parquet(file, path, name)
    buffered = io.BufferedReader(file, BLOCK_SIZE)
    head = buffered.peek(BLOCK_SIZE).removeprefix(BYTE_ORDER_MARK).lstrip()
    # Some .json files hold one object per line.
    if kind == "json" and head.startswith(b"["):
        return _read_json_list(buffered, path, name)
    return _read_json_lines(buffered, name)


def _read_json_lines(file: Any, name: str) -> Iterator[Record]:
    number = 0
    while line := file.readline(MAX_ROW_BYTES + 1):
        number += 1
        where = f"{name}, line {number}"
        size = len(line)
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
        return _record_of(where, STRICT_DECODER.decode(line.decode()), len(line))
    except UnicodeDecodeError as e:
        return Record(where, None, "not_utf8", f"byte {e.start + 1} is not UTF-8; save the file as UTF-8")
    except json.JSONDecodeError as e:
        message = f"not JSON ({e.msg} at column {e.colno}); write one complete JSON object on each line"
        return Record(where, None, "not_json", message)
    except RepeatedKeyError as e:
        return Record(where, None, "repeated_key", str(e))
    except (ValueError, RecursionError) as e:
        return Record(where, None, "not_json", f"not readable JSON ({e}); correct the line or remove it")


def _read_json_list(file: Any, path: str, name: str) -> Iterator[Record]:
    """Read a JSON list element by element; the buffer grows until the next element is complete."""
    text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape")
    buffer = text.read(BLOCK_SIZE)
    at = buffer.index("[") + 1
    number = 0
    while True:
        while at < len(buffer) and buffer[at] in " \t\r\n,":
            at += 1
        if buffer.startswith("]", at):
            return
        try:
            record, end = _decode_element(buffer, at, f"{name}, row {number + 1}")
        except (ValueError, RecursionError) as e:
            left = len(buffer) - at
            more = text.read(max(BLOCK_SIZE, left)) if left < MAX_BUFFER_CHARS else ""
            if not more:
                rule = f"not JSON ({getattr(e, 'msg', e)}), so the next rows cannot be found"
                remedy = "correct it or write one JSON object on each line of a .jsonl file"
                raise ValueError(f"{path}, row {number + 1}: {rule}; {remedy}") from e
            buffer = buffer[at:] + more
            at = 0
            continue
        number += 1
        at = end
        yield record


def _decode_element(buffer: str, at: int, where: str) -> tuple[Record, int]:
    """Decode the element at an index of the buffer; return its record and the index of its end."""
    try:
        row, end = STRICT_DECODER.raw_decode(buffer, at)
    except RepeatedKeyError as e:
        return Record(where, None, "repeated_key", str(e)), DECODER.raw_decode(buffer, at)[1]
    if end - at > MAX_ROW_BYTES:
        return _too_large(where, end - at), end
    try:
        buffer[at:end].encode()
    except UnicodeEncodeError as e:
        message = f"character {e.start + 1} of the row is not UTF-8; save the file as UTF-8"
        return Record(where, None, "not_utf8", message), end
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
                yield _parquet_record(batch.slice(i, 1), f"{name}, row {number}", size)
    except pa.ArrowException as e:
        raise ValueError(f"{path} is not readable Parquet ({e}); write it again") from e


def _parquet_record(batch: Any, where: str, size: int) -> Record:
    try:
        return Record(where, batch.to_pylist()[0], size=size)
    except UnicodeDecodeError as e:
        return Record(where, None, "not_utf8", f"{e.reason} at byte {e.start + 1}; write text as UTF-8")


def _record_of(where: str, row: Any, size: int) -> Record:
    if isinstance(row, dict):
        return Record(where, row, size=size)
    message = f"a row must be a JSON object, got {type(row).__name__}; write {{...}} with messages"
    return Record(where, None, "not_an_object", message)


def _too_large(where: str, size: int) -> Record:
    message = f"{size:,} bytes, more than {MAX_ROW_BYTES:,}; cut the row into conversations"
    return Record(where, None, "row_too_large", message)


def _unique(pairs: list[tuple[str, Any]]) -> Row:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [key for key, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise RepeatedKeyError(f"an object has the key {repeated!r} twice; keep one of them")
    return row


DECODER = json.JSONDecoder()
STRICT_DECODER = json.JSONDecoder(object_pairs_hook=_unique)
