"""Which draft is served: decided by acceptance, kept in a place that outlives runs, moved by one writer at a time.

A place is a directory or a URL:

    promoted.json             the draft to serve: {number, export, digest, acceptance_length, heldout_digest, target …}
    promotions/00003.json     every promotion, the third here; promoted.json is a copy of the last one
    drafts/<digest>/          the promoted exports; none is ever removed or written over

A promotion creates the next number's file, which the store lets one writer do (a local disk and S3 at least; others may look
first, then write); who comes second was compared with a draft that is no longer the current one, and is told so. A writer that is
killed between the file and promoted.json is made up for: whoever reads looks for higher numbers.
"""

import json
import os
import shutil
import uuid
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import fsspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eagle3.files import file_size, is_remote, read_bytes, retry
from eagle3.uris import redact, redact_secrets

POINTER = "promoted.json"
FILES = ("model.safetensors", "config.json")


class Promoted(BaseModel):
    """A promotion as it stands in a file. number: counts up from 1. previous: digest of the draft before, "" for the first."""

    model_config = ConfigDict(frozen=True)

    number: int = Field(ge=1)
    export: str = Field(min_length=1)
    digest: str = Field(min_length=1)
    acceptance_length: float
    heldout_digest: str
    target: str
    target_digest: str
    previous: str = ""


@dataclass(frozen=True)
class Measurement:
    """A draft as it was evaluated. digest: the export's. settings: everything else that the figure depends on, as text."""

    digest: str
    heldout_digest: str
    settings: str
    acceptance_length: float
    outputs_identical: bool


@dataclass(frozen=True)
class Decision:
    """promote: whether the new draft is to be served. reason: one sentence."""

    promote: bool
    reason: str


def decide(
    new: Measurement, current: Measurement | None, margin: float, identical_text: bool = True
) -> Decision:
    """Whether a new draft may take the current one's place: not if it is worse by more than `margin`.

    Args:
        current: None where no draft was promoted yet.
        margin: of acceptance length, tokens a target pass.
        identical_text: refuse a draft with which the text is another on any held-out prompt.

    Raises:
        ValueError: if the two were measured on different prompts or settings, which compares nothing.
    """
    if identical_text and not new.outputs_identical:
        return Decision(
            False,
            "the text with the draft differs from the target's own: see differing_prompts in evaluation.json",
        )
    length = new.acceptance_length
    if not length >= 1:  # NaN too
        return Decision(False, f"an acceptance length is at least 1, got {length}")
    if current is None:
        return Decision(True, f"it is the first, acceptance length {length:.3f}")
    if new.digest == current.digest:
        return Decision(False, "it is the current draft")
    if (new.heldout_digest, new.settings) != (current.heldout_digest, current.settings):
        raise ValueError(
            f"drafts are compared on the same held-out prompts and settings, got {new.heldout_digest} ({new.settings}) and "
            f"{current.heldout_digest} ({current.settings}); evaluate the current draft anew"
        )
    text = f"acceptance length {length:.3f} after {current.acceptance_length:.3f}, margin {margin}"
    if not length >= current.acceptance_length - margin:
        return Decision(False, f"it is worse: {text}")
    return Decision(True, text)


@redact_secrets()
def current_promotion(place: str) -> Promoted | None:
    """The draft that is served now; None where there is none yet.

    Raises:
        ValueError: if promoted.json or a later promotion is not readable, or the export that it names is gone.
    """
    root = _root(place)
    found = _read(f"{root}/{POINTER}")
    number = found.number + 1 if found else 1
    while (later := _read(_record(root, number))) is not None:
        if later.number != number:
            raise ValueError(
                f"{redact(_record(root, number))} must have its own number {number}, got {later.number}; correct it"
            )
        found, number = later, number + 1
    if found and file_size(f"{found.export}/{FILES[-1]}") is None:
        raise ValueError(
            f"the promoted draft {redact(found.export)} is gone; put it back, or move {redact(root)}/{POINTER} and "
            "promotions/ away to start anew"
        )
    return found


@redact_secrets()
def restore_pointer(place: str) -> Promoted | None:
    """The draft that is served now, with promoted.json naming it: a writer that was killed, or a hand, may have added another."""
    root = _root(place)
    current = current_promotion(place)
    if current and _read(f"{root}/{POINTER}") != current:
        _replace(f"{root}/{POINTER}", current.model_dump_json(indent=1).encode())
    return current


@redact_secrets()
def promote(place: str, export_dir: str, new: Promoted) -> Promoted:
    """Keep a draft and let promoted.json name it.

    Args:
        export_dir: local directory of the draft, FILES in it.
        new: its number is one above the promotion that it was compared with; its export is set here.

    Returns:
        This promotion; the same one again, where an attempt before was cut off, counts once.

    Raises:
        FileExistsError: if another draft was promoted meanwhile.
    """
    root = _root(place)
    new = new.model_copy(update={"export": f"{root}/drafts/{new.digest}"})
    _keep(export_dir, new.export)
    _create(_record(root, new.number), new.model_dump_json(indent=1).encode())
    newest = current_promotion(root) or new
    _replace(f"{root}/{POINTER}", newest.model_dump_json(indent=1).encode())
    return new


def _root(place: str) -> str:
    return place.rstrip("/") if is_remote(place) else str(Path(place).expanduser().resolve())


def _record(root: str, number: int) -> str:
    return f"{root}/promotions/{number:05d}.json"


def _read(path: str) -> Promoted | None:
    text = read_bytes(path)
    if text is None:
        return None
    try:
        return Promoted.model_validate(json.loads(text))
    except (ValueError, ValidationError) as e:
        raise ValueError(
            f"{redact(path)} does not name a promoted draft ({e}); restore it from promotions/ beside it, or move it away"
        ) from e


def _keep(export_dir: str, kept_dir: str) -> None:
    """Copy the export's files, config.json last. What lies there whole under the same digest stays; what is damaged is mended."""
    for name in FILES:
        source, kept = Path(export_dir) / name, f"{kept_dir}/{name}"
        if file_size(kept) == source.stat().st_size:
            continue
        if is_remote(kept):
            store, path = fsspec.core.url_to_fs(kept)
            retry(partial(store.put_file, str(source), path), kept)
            continue
        part = Path(f"{kept}.{uuid.uuid4().hex}.part")
        part.parent.mkdir(parents=True, exist_ok=True)
        try:
            shutil.copyfile(source, part)
            part.replace(kept)
        finally:
            part.unlink(missing_ok=True)


def _create(path: str, data: bytes) -> None:
    """Write a file that nobody has written: whole, and by one writer alone, who may have been cut off behind it and come again.

    Raises:
        FileExistsError: if another has.
        ConnectionError: if the store does not take it.
    """
    try:
        _write_new(path, data)
    # Not every store's connection errors are OSErrors: botocore's are not.
    except Exception as e:
        found = read_bytes(path)
        if found is None:
            raise ConnectionError(
                f"{path} could not be written ({e!r}); check the store and run again"
            ) from e
        if found != data:
            raise FileExistsError(path) from e


def _write_new(path: str, data: bytes) -> None:
    if is_remote(path):
        store, name = fsspec.core.url_to_fs(path)
        store.invalidate_cache()
        store.pipe_file(name, data, mode="create")
        return
    part = _part(path, data)
    try:
        os.link(part, path)
    finally:
        part.unlink()


def _replace(path: str, data: bytes) -> None:
    if is_remote(path):
        store, name = fsspec.core.url_to_fs(path)
        retry(lambda: store.pipe_file(name, data), path)
        return
    _part(path, data).replace(path)


def _part(path: str, data: bytes) -> Path:
    """A file beside it that no other writer has."""
    part = Path(f"{path}.{uuid.uuid4().hex}.part")
    part.parent.mkdir(parents=True, exist_ok=True)
    part.write_bytes(data)
    return part
