"""Shards that exist already: found by path or URL, counted from their own content, and refused where they do not fit this run.

A place is a shard, a directory of shards, or the listing of an earlier run: token_shards.json or hidden_states.json, which names
the shards in order, with the target that they were made for. Order matters: the digest over all shards is taken in it.
"""

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import fsspec
import numpy as np

from eagle3.files import file_size, is_remote, read_bytes, retry
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

REMOTE_HINT = "correct it, and in a remote run give a URL like s3://bucket/shards: a pod cannot read directories of your machine"
# safetensors' own limit.
MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class ExistingTokens:
    """A token shard. waits: some of its rows have no answer yet. is_tool_tasks: these offer tools."""

    place: str
    summary: TokenShardSummary
    waits: bool
    is_tool_tasks: bool


@dataclass(frozen=True)
class ExistingStates:
    """A hidden-state shard, its manifest, and its rows, whose source and script are not kept: both are empty."""

    place: str
    manifest: dict[str, Any]
    rows: list[TokenRow]


def listing(kind: str, target: dict[str, str], shards: Iterable[dict[str, Any]]) -> str:
    """The text of a listing.

    Args:
        kind: "token_shards" or "hidden_states".
        target: name, revision and digest.
        shards: place and counts of each, in order.
    """
    return json.dumps({"kind": kind, "target": target, "shards": list(shards)}, indent=1)


@redact_secrets()
def find_token_shards(
    places: Sequence[str], target: dict[str, str], vocab_size: int, heldout: list[TokenRow]
) -> list[ExistingTokens]:
    """Find token shards and read what is in them.

    Args:
        places: as above; of a directory its *.parquet files by name, held-out prompts excepted.
        target: name, revision and digest of this run's target.
        vocab_size: of this run's target.
        heldout: its held-out prompts, which no shard may begin a conversation with.

    Raises:
        ValueError: if there is none, one is damaged or given twice, or does not fit; names it and the remedy.
    """
    found = []
    for place in _expand(places, "token_shards", target, _parquet_files):
        rows = _token_rows(place)
        _check_ids(place, rows, vocab_size)
        _check_heldout(place, rows, heldout)
        waiting = [row.script for row in rows if not any(row.loss_mask)]
        is_tool_tasks = bool(waiting) and all(is_tool_task(script) for script in waiting)
        found.append(ExistingTokens(place, summarise_rows(rows), bool(waiting), is_tool_tasks))
    _check_distinct([(shard.place, shard.summary.digest) for shard in found])
    return found


@redact_secrets()
def find_hidden_states(
    places: Sequence[str],
    target: dict[str, str],
    layer_ids: list[int],
    vocab_size: int,
    heldout: list[TokenRow],
) -> list[ExistingStates]:
    """Find hidden-state shards; reads manifests, sizes of chunks, and of each chunk no more than token ids and masks.

    Args:
        places: as above; a directory without a manifest stands for those in it.
        layer_ids: aux layers of this run, ascending.
        target, vocab_size, heldout: as for `find_token_shards`.

    Raises:
        ValueError: if there is none, one is unfinished, damaged or given twice, or does not fit; names it and the remedy.
    """
    found = []
    for place in _expand(places, "hidden_states", target, _shard_dirs):
        manifest = parse_manifest(read_bytes(f"{place}/{MANIFEST_NAME}"), f"{place}/{MANIFEST_NAME}")
        _check_made_for(place, _target_of(manifest), target)
        if (theirs := manifest["info"].get("layer_ids")) != layer_ids:
            raise ValueError(
                f"{redact(place)} holds the aux layers {theirs}, this run wants {layer_ids}; set extract.layer_ids to the former"
            )
        rows = [row for entry in manifest["chunks"] for row in _chunk_rows(f"{place}/{entry['file']}", entry)]
        _check_ids(place, rows, vocab_size)
        _check_heldout(place, rows, heldout)
        found.append(ExistingStates(place, manifest, rows))
    _check_distinct([(shard.place, shard.manifest["digest"]) for shard in found])
    return found


def _expand(places: Sequence[str], kind: str, target: dict[str, str], inside: Any) -> list[str]:
    """The shards that the places stand for, in order."""
    if not places:
        raise ValueError(
            "at least one shard must be given, got none; name files, directories or a listing in `shards`"
        )
    found: list[str] = []
    for given in map(check_uri, places):
        place = given.rstrip("/") if is_remote(given) else str(Path(given).expanduser().resolve())
        found += _listed(place, kind, target) if place.endswith(".json") else inside(place)
    return found


def _listed(place: str, kind: str, target: dict[str, str]) -> list[str]:
    text = read_bytes(place)
    if text is None:
        raise ValueError(f"{redact(place)}: no such listing; {REMOTE_HINT}")
    try:
        content = json.loads(text)
        found, made_for, shards = (
            content["kind"],
            content["target"],
            [str(shard["place"]) for shard in content["shards"]],
        )
        dict(made_for)
    except (ValueError, KeyError, TypeError) as e:
        raise ValueError(
            f"{redact(place)} is not a listing of shards ({e!r}); give {kind}.json of a run, or the shards themselves"
        ) from e
    if found != kind:
        other = {"token_shards": "train_from_shards", "hidden_states": "train_from_states"}.get(
            found, "no workflow"
        )
        raise ValueError(f"{redact(place)} lists {found}, this workflow starts from {kind}; {other} takes it")
    _check_made_for(place, made_for, target)
    return list(map(check_uri, shards))


def _parquet_files(place: str) -> list[str]:
    if place.endswith(".parquet"):
        return [place]
    names = [name for name in _names(place) if name.endswith(".parquet") and name != HELDOUT_NAME]
    if not names:
        raise ValueError(f"{redact(place)} holds no token shard (*.parquet); {REMOTE_HINT}")
    return [f"{place}/{name}" for name in names]


def _shard_dirs(place: str) -> list[str]:
    names = _names(place)
    if MANIFEST_NAME in names or any(name.startswith("chunk-") for name in names):
        return [place]
    inside = [
        f"{place}/{name}"
        for name in names
        if not name.startswith(".") and read_bytes(f"{place}/{name}/{MANIFEST_NAME}")
    ]
    if not inside:
        raise ValueError(
            f"{redact(place)} holds no finished hidden-state shard ({MANIFEST_NAME}); {REMOTE_HINT}"
        )
    return inside


def _names(place: str) -> list[str]:
    """Names in a directory, sorted; none where there is no such directory."""

    def look() -> list[str]:
        store, path = fsspec.core.url_to_fs(place)
        store.invalidate_cache()
        return sorted({str(name).rstrip("/").rpartition("/")[2] for name in store.ls(path, detail=False)})

    with suppress(FileNotFoundError, NotADirectoryError):
        return retry(look, place) if is_remote(place) else sorted(path.name for path in Path(place).iterdir())
    return []


def _token_rows(place: str) -> list[TokenRow]:
    if not is_remote(place):
        return read_token_shard(place)
    data = read_bytes(place)
    if data is None:
        raise ValueError(f"{redact(place)}: no such token shard; {REMOTE_HINT}")
    with TemporaryDirectory() as directory:
        copy = Path(directory) / "shard.parquet"
        copy.write_bytes(data)
        try:
            return read_token_shard(copy)
        except ValueError as e:
            raise ValueError(str(e).replace(str(copy), place)) from e


def _chunk_rows(place: str, entry: dict[str, Any]) -> list[TokenRow]:
    """Token ids and loss masks of a chunk: two ranges of the file, whatever the size of its states."""
    check_chunk_size(file_size(place), entry, place)
    try:
        ids, mask = retry(lambda: _read_ranges(place, entry["bytes"], sum(entry["lengths"])), place)
    except (ValueError, KeyError, TypeError) as e:
        raise ValueError(
            f"{redact(place)} is not a chunk of hidden states ({e}); delete its shard and extract it again"
        ) from e
    rows, start = [], 0
    for sample_id, length in zip(entry["sample_ids"], entry["lengths"], strict=True):
        stop = start + length
        rows.append(TokenRow(sample_id, "", ids[start:stop].tolist(), mask[start:stop].tolist()))
        start = stop
    return rows


def _read_ranges(place: str, size_bytes: int, num_tokens: int) -> tuple[Any, Any]:
    with fsspec.open(place, "rb") as f:
        header_bytes = int.from_bytes(f.read(8), "little")
        if not 2 <= header_bytes <= min(MAX_HEADER_BYTES, size_bytes - 8):
            raise ValueError(f"its header says {header_bytes} bytes")
        header = json.loads(f.read(header_bytes))
        found = []
        for name, kind, dtype in (
            ("token_ids", "I32", np.dtype("<i4")),
            ("loss_mask", "BOOL", np.dtype(bool)),
        ):
            begin, end = header[name]["data_offsets"]
            is_sound = header[name]["dtype"] == kind and header[name]["shape"] == [num_tokens]
            if (
                not is_sound
                or end - begin != num_tokens * dtype.itemsize
                or not 0 <= begin <= end <= size_bytes - 8 - header_bytes
            ):
                raise ValueError(f"{name} must be {num_tokens} of {kind}, got {header[name]}")
            f.seek(8 + header_bytes + begin)
            found.append(np.frombuffer(f.read(end - begin), dtype))
    return found[0], found[1]


def _target_of(manifest: dict[str, Any]) -> dict[str, str]:
    info = manifest["info"]
    return {
        "name": info.get("target", ""),
        "revision": info.get("target_revision", ""),
        "digest": info.get("target_digest", ""),
    }


def _check_made_for(place: str, theirs: dict[str, str], target: dict[str, str]) -> None:
    if theirs.get("digest") != target["digest"]:
        raise ValueError(
            f"{redact(place)} was made for the target {theirs.get('name')}, revision {theirs.get('revision')}, digest "
            f"{theirs.get('digest')}; this run's is {target['name']}, revision {target['revision']}, digest {target['digest']}: "
            "set target.name and target.revision (and its chat template) to the former, or make new shards"
        )


def _check_ids(place: str, rows: list[TokenRow], vocab_size: int) -> None:
    for row in rows:
        if not row.token_ids or not 0 <= min(row.token_ids) <= max(row.token_ids) < vocab_size:
            raise ValueError(
                f"{redact(place)}: row {row.sample_id} needs token ids from 0 to {vocab_size - 1}, the target's; "
                "it was prepared for another target: prepare it again with this one's tokenizer"
            )


def _check_heldout(place: str, rows: list[TokenRow], heldout: list[TokenRow]) -> None:
    """Sample ids begin with a hash of the conversation's first user text."""
    openings = {row.sample_id.partition(":")[0] for row in heldout}
    num_shared = sum(row.sample_id.partition(":")[0] in openings for row in rows)
    if num_shared:
        raise ValueError(
            f"{redact(place)}: {num_shared} of {len(rows)} rows begin with a held-out prompt, so the measurement would flatter; "
            "give heldout other prompts, or prepare the shards with this heldout file"
        )


def _check_distinct(shards: list[tuple[str, str]]) -> None:
    seen: dict[str, str] = {}
    for place, digest in shards:
        if digest in seen:
            raise ValueError(
                f"{redact(place)} and {redact(seen[digest])} are the same shard (digest {digest}); give each once"
            )
        seen[digest] = place
