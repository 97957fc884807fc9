"""What earlier attempts finished of a hidden-state shard: the chunks that are noted down beside their files, or all of it.

A finished chunk's manifest entry lies at `entry_place` as {"digest", "entry"} until the manifest gathers it; the digest is the
shard's, so that a chunk of other rows or settings is not gone on from.
"""

import json
from pathlib import Path
from typing import Any

from eagle3.files import file_sha256, file_size, is_remote, read_bytes
from eagle3.shards.hidden_states import MANIFEST_NAME, check_entry, parse_manifest


def entry_place(out: str, number: int) -> str:
    """Where the entry of a finished chunk lies until there is a manifest."""
    return f"{out}/chunk-{number:05d}.json"


def finished_entries(out: str, sample_ids: list[list[str]], digest: str) -> dict[int, dict[str, Any]]:
    """Entries of the chunks that lie finished in `out`, by number.

    Args:
        out: directory or fsspec URL of the shard.
        sample_ids: of the rows of each chunk of the shard, in order.
        digest: of the shard: its rows and settings.
    """
    found = {number: _usable_entry(out, number, ids, digest) for number, ids in enumerate(sample_ids)}
    return {number: entry for number, entry in found.items() if entry is not None}


def _usable_entry(out: str, number: int, sample_ids: list[str], digest: str) -> dict[str, Any] | None:
    text = read_bytes(entry_place(out, number))
    try:
        sidecar = json.loads(text or b"{}")
        entry: dict[str, Any] = sidecar["entry"]
        check_entry(entry)
        same = (sidecar["digest"], entry["sample_ids"]) == (digest, sample_ids)
    except (ValueError, KeyError, TypeError):
        return None
    place = f"{out}/{entry['file']}"
    if not same or file_size(place) != entry["bytes"]:
        return None
    # A local file may have been torn by a crash of the machine; a store takes objects whole.
    return entry if is_remote(place) or file_sha256(place) == entry["sha256"] else None


def remove_other_chunks(out: str, entries: dict[int, dict[str, Any]]) -> None:
    """Remove chunk files that no entry names: of an attempt that was killed before it could note them down.

    Not at a URL: another machine may be about to note its own down.
    """
    if is_remote(out):
        return
    named = {entry["file"] for entry in entries.values()}
    for path in Path(out).glob("chunk-*.safetensors"):
        if path.name not in named:
            path.unlink()


def finished_manifest(out: str | Path) -> dict[str, Any] | None:
    """The manifest of a shard that an earlier attempt finished, all its chunks there; else None."""
    place = f"{str(out).rstrip('/')}/{MANIFEST_NAME}"
    text = read_bytes(place)
    if text is None:
        return None
    try:
        manifest = parse_manifest(text, place)
    except ValueError:
        return None
    whole = all(
        file_size(f"{str(out).rstrip('/')}/{entry['file']}") == entry["bytes"] for entry in manifest["chunks"]
    )
    return manifest if whole else None
