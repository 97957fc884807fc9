"""Shards that exist: find them by path or URL, check that they fit this run, and count their content.

A recipe names shards, directories of shards, or listings of earlier runs. A listing, token_shards.json or
hidden_states.json, has shards in order and the target that they were made for. Order matters: the digest
over all shards depends on it.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import fsspec
import numpy as np

from eagle3.files import copy_file, file_size, is_remote, list_names, read_bytes, retry
from eagle3.shards.hidden_states import MANIFEST_NAME, check_chunk_size, parse_manifest
from eagle3.shards.tokens import (
    HELDOUT_NAME,
    TokenRow,
    TokenShardSummary,
    is_tool_task,
    read_token_shard,
    summarise_rows,
)
from eagle3.uris import check_uri, redact, redact_secrets

REMOTE_HINT = (
    "correct it, and in a remote run give a URL like s3://bucket/shards: a pod cannot read directories of "
    "your machine"
)
MAX_HEADER_BYTES = 100_000_000  # as in safetensors


@dataclass(frozen=True)
class ExistingTokens:
    """A token shard. waits: some of its rows have no answer yet. is_tool_tasks: all of these offer tools."""

    uri: str
    summary: TokenShardSummary
    waits: bool
    is_tool_tasks: bool


@dataclass(frozen=True)
class ExistingStates:
    """A hidden-state shard, its manifest, and its rows with empty source and script, which are not stored."""

    uri: str
    manifest: dict[str, Any]
    rows: list[TokenRow]


def listing(kind: str, target: dict[str, str], shards: Iterable[dict[str, Any]]) -> str:
    """The text of a listing.

    Args:
        kind: "token_shards" or "hidden_states".
        target: name, revision and digest.
        shards: place (path or URL) and counts of each, in order.
    """
    return json.dumps({"kind": kind, "target": target, "shards": list(shards)}, indent=1)


@redact_secrets()
def find_token_shards(
    uris: Sequence[str], target: dict[str, str], vocab_size: int, heldout: list[TokenRow]
) -> list[ExistingTokens]:
    """Find token shards and read them.

    Args:
        uris: as above; a directory stands for its *.parquet files by name, without the held-out prompts.
        target: name, revision and digest of this run's target.
        vocab_size: of this run's target.
        heldout: its held-out prompts; no conversation of a shard may begin with one.

    Raises:
        ValueError: if there is none, or one is damaged, given twice or does not fit; names it and the remedy.
    """
    found = []
    for uri in _expand(uris, "token_shards", target, _parquet_files):
        rows = _token_rows(uri)
        _check_rows(uri, rows, vocab_size, heldout)
        waiting = [row.script for row in rows if not any(row.loss_mask)]
        is_tool_tasks = bool(waiting) and all(map(is_tool_task, waiting))
        found.append(ExistingTokens(uri, summarise_rows(rows), bool(waiting), is_tool_tasks))
    _check_distinct([(shard.uri, shard.summary.digest) for shard in found])
    return found


@redact_secrets()
def find_hidden_states(
    uris: Sequence[str],
    target: dict[str, str],
    layer_ids: list[int],
    vocab_size: int,
    heldout: list[TokenRow],
) -> list[ExistingStates]:
    """Find hidden-state shards; reads manifests, sizes of chunks, and of each chunk only token ids and masks.

    Args:
        uris: as above; a directory without a manifest stands for the shards in it.
        layer_ids: aux layers of this run, ascending.
        target, vocab_size, heldout: as for `find_token_shards`.

    Raises:
        ValueError: as `find_token_shards`, and if one is unfinished.
    """
    found = []
    for uri in _expand(uris, "hidden_states", target, _shard_dirs):
        manifest = parse_manifest(read_bytes(f"{uri}/{MANIFEST_NAME}"), f"{uri}/{MANIFEST_NAME}")
        info = manifest["info"]
        made_for = {key: info.get(f"target_{key}", "") for key in ("revision", "digest")} | {
            "name": info.get("target", "")
        }
        _check_made_for(uri, made_for, target)
        if (theirs := info.get("layer_ids")) != layer_ids:
            raise ValueError(
                f"{redact(uri)} holds the aux layers {theirs}, this run wants {layer_ids}; set "
                "extract.layer_ids to the former"
            )
        rows = [row for entry in manifest["chunks"] for row in _chunk_rows(f"{uri}/{entry['file']}", entry)]
        _check_rows(uri, rows, vocab_size, heldout)
        found.append(ExistingStates(uri, manifest, rows))
    _check_distinct([(shard.uri, shard.manifest["digest"]) for shard in found])
    return found


def _expand(
    uris: Sequence[str], kind: str, target: dict[str, str], shards_in: Callable[[str], list[str]]
) -> list[str]:
    """The shards that the URIs stand for, in order."""
    if not uris:
        raise ValueError(
            "at least one shard must be given, got none; name files, directories or a listing in `shards`"
        )
    found: list[str] = []
    for given in map(check_uri, uris):
        uri = given.rstrip("/") if is_remote(given) else str(Path(given).expanduser().resolve())
        found += _listed(uri, kind, target) if uri.endswith(".json") else shards_in(uri)
    return found


def _listed(uri: str, kind: str, target: dict[str, str]) -> list[str]:
    text = read_bytes(uri)
    if text is None:
        raise ValueError(f"{redact(uri)}: no such listing; {REMOTE_HINT}")
    try:
        content = json.loads(text)
        found = content["kind"]
        made_for = dict(content["target"])
        shards = [str(shard["place"]) for shard in content["shards"]]
    except (ValueError, KeyError, TypeError) as e:
        raise ValueError(
            f"{redact(uri)} is not a listing of shards ({e!r}); give {kind}.json of a run, or the shards "
            "themselves"
        ) from e
    if found != kind:
        workflows = {"token_shards": "train_from_shards", "hidden_states": "train_from_states"}
        takes_it = workflows.get(found, "no workflow")
        raise ValueError(
            f"{redact(uri)} lists {found}, this workflow starts from {kind}; {takes_it} takes it"
        )
    _check_made_for(uri, made_for, target)
    return list(map(check_uri, shards))


def _parquet_files(uri: str) -> list[str]:
    if uri.endswith(".parquet"):
        return [uri]
    names = [name for name in list_names(uri) if name.endswith(".parquet") and name != HELDOUT_NAME]
    if not names:
        raise ValueError(f"{redact(uri)} holds no token shard (*.parquet); {REMOTE_HINT}")
    return [f"{uri}/{name}" for name in names]


def _shard_dirs(uri: str) -> list[str]:
    names = list_names(uri)
    if MANIFEST_NAME in names or any(name.startswith("chunk-") for name in names):
        return [uri]
    inside = [f"{uri}/{name}" for name in names if not name.startswith(".")]
    shards = [shard for shard in inside if read_bytes(f"{shard}/{MANIFEST_NAME}")]
    if not shards:
        raise ValueError(
            f"{redact(uri)} holds no finished hidden-state shard ({MANIFEST_NAME}); {REMOTE_HINT}"
        )
    return shards


def _token_rows(uri: str) -> list[TokenRow]:
    if not is_remote(uri):
        return read_token_shard(uri)
    with TemporaryDirectory() as directory:
        copy = Path(directory) / "shard.parquet"
        try:
            copy_file(uri, copy)
            return read_token_shard(copy)
        except FileNotFoundError as e:
            raise ValueError(f"{redact(uri)}: no such token shard; {REMOTE_HINT}") from e
        except ValueError as e:
            raise ValueError(str(e).replace(str(copy), uri)) from e


def _chunk_rows(uri: str, entry: dict[str, Any]) -> list[TokenRow]:
    """Token ids and loss masks of a chunk: two ranges of the file, whatever the size of its states."""
    check_chunk_size(file_size(uri), entry, uri)
    try:
        ids, mask = retry(lambda: _read_ids_and_mask(uri, entry["bytes"], sum(entry["lengths"])), uri)
    except (ValueError, KeyError, TypeError) as e:
        raise ValueError(
            f"{redact(uri)} is not a chunk of hidden states ({e}); delete its shard and extract it again"
        ) from e
    rows = []
    start = 0
    for sample_id, length in zip(entry["sample_ids"], entry["lengths"], strict=True):
        stop = start + length
        rows.append(TokenRow(sample_id, "", ids[start:stop].tolist(), mask[start:stop].tolist()))
        start = stop
    return rows


def _read_ids_and_mask(uri: str, size_bytes: int, num_tokens: int) -> tuple[Any, Any]:
    with fsspec.open(uri, "rb") as f:
        header_bytes = int.from_bytes(f.read(8), "little")
        if not 2 <= header_bytes <= min(MAX_HEADER_BYTES, size_bytes - 8):
            raise ValueError(f"its header has {header_bytes} bytes")
        header = json.loads(f.read(header_bytes))
        data_bytes = size_bytes - 8 - header_bytes

        def read(name: str, kind: str, dtype: Any) -> Any:
            begin, end = header[name]["data_offsets"]
            is_sound = header[name]["dtype"] == kind and header[name]["shape"] == [num_tokens]
            is_sound = is_sound and end - begin == num_tokens * np.dtype(dtype).itemsize
            if not is_sound or not 0 <= begin <= end <= data_bytes:
                raise ValueError(f"{name} must be {num_tokens} of {kind}, got {header[name]}")
            f.seek(8 + header_bytes + begin)
            return np.frombuffer(f.read(end - begin), dtype)

        return read("token_ids", "I32", "<i4"), read("loss_mask", "BOOL", bool)


def _check_made_for(uri: str, theirs: dict[str, str], target: dict[str, str]) -> None:
    if theirs.get("digest") != target["digest"]:
        raise ValueError(
            f"{redact(uri)} was made for the target {theirs.get('name')}, revision "
            f"{theirs.get('revision')}, digest {theirs.get('digest')}; this run's is {target['name']}, "
            f"revision {target['revision']}, digest {target['digest']}: set target.name and target.revision "
            "(and its chat template) to the former, or make new shards"
        )


def _check_rows(uri: str, rows: list[TokenRow], vocab_size: int, heldout: list[TokenRow]) -> None:
    for row in rows:
        if not row.token_ids or not 0 <= min(row.token_ids) <= max(row.token_ids) < vocab_size:
            raise ValueError(
                f"{redact(uri)}: row {row.sample_id} needs token ids from 0 to {vocab_size - 1}, the "
                "target's; it was prepared for another target: prepare it again with this one's tokenizer"
            )
    # Sample ids begin with a hash of the conversation's first user text.
    openings = {row.sample_id.partition(":")[0] for row in heldout}
    num_shared = sum(row.sample_id.partition(":")[0] in openings for row in rows)
    if num_shared:
        raise ValueError(
            f"{redact(uri)}: {num_shared} of {len(rows)} rows begin with a held-out prompt, so acceptance "
            "would be measured too high; give heldout other prompts, or prepare the shards with this "
            "heldout file"
        )


def _check_distinct(shards: list[tuple[str, str]]) -> None:
    seen: dict[str, str] = {}
    for uri, digest in shards:
        if digest in seen:
            raise ValueError(
                f"{redact(uri)} and {redact(seen[digest])} are the same shard (digest {digest}); give each "
                "once"
            )
        seen[digest] = uri
