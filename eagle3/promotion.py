"""Which draft is served: decided by acceptance length, recorded in a directory or at a URL.

    promoted.json           the draft to serve: {number, export, digest, acceptance_length, target …}
    promotions/00003.json   every promotion, here the third; promoted.json is a copy of the last one
    drafts/<digest>/        the promoted exports; none is ever removed or overwritten

A promotion creates the file of the next number. The store lets one writer do that (a local disk and S3 at
least; other stores may check first and then write). The second writer was compared with a draft that is no
longer the current one, so it gets an error. Readers look for higher numbers than promoted.json has: a writer
may have been killed between the two files.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eagle3.files import copy_file, create_file, file_size, is_remote, read_bytes, write_bytes
from eagle3.uris import redact, redact_secrets

POINTER = "promoted.json"
FILES = ("model.safetensors", "config.json")


class Promoted(BaseModel):
    """A promotion. number: counts up from 1. previous: digest of the draft before, "" for the first."""

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
    """An evaluated draft. digest: the export's. settings: what else the acceptance length depends on."""

    digest: str
    heldout_digest: str
    settings: str
    acceptance_length: float
    outputs_identical: bool


@dataclass(frozen=True)
class Decision:
    """promote: whether to serve the new draft. reason: one sentence."""

    promote: bool
    reason: str


def decide(
    new: Measurement, current: Measurement | None, margin: float, identical_text: bool = True
) -> Decision:
    """Decide whether a new draft replaces the current one: not if it is worse by more than `margin`.

    Args:
        current: None if no draft was promoted yet.
        margin: of acceptance length, tokens per target pass.
        identical_text: refuse a draft that changes the text of any held-out prompt.

    Raises:
        ValueError: if the two were measured on different prompts or with different settings.
    """
    if identical_text and not new.outputs_identical:
        reason = (
            "the text with the draft differs from the target's own: see differing_prompts in evaluation.json"
        )
        return Decision(False, reason)
    length = new.acceptance_length
    if not length >= 1:  # NaN too
        return Decision(False, f"an acceptance length is at least 1, got {length}")
    if current is None:
        return Decision(True, f"it is the first, acceptance length {length:.3f}")
    if new.digest == current.digest:
        return Decision(False, "it is the current draft")
    if (new.heldout_digest, new.settings) != (current.heldout_digest, current.settings):
        raise ValueError(
            f"drafts are compared on the same held-out prompts and settings, got {new.heldout_digest} "
            f"({new.settings}) and {current.heldout_digest} ({current.settings}); evaluate the current "
            "draft again"
        )
    text = f"acceptance length {length:.3f} after {current.acceptance_length:.3f}, margin {margin}"
    is_worse = not length >= current.acceptance_length - margin
    return Decision(not is_worse, f"it is worse: {text}" if is_worse else text)


@redact_secrets()
def current_promotion(uri: str) -> Promoted | None:
    """The draft that is served now; None if none was promoted yet.

    Raises:
        ValueError: if promoted.json or a later promotion is not readable, or its export is gone.
    """
    root = _root(uri)
    found = _read(f"{root}/{POINTER}")
    number = found.number + 1 if found else 1
    while (later := _read(_record(root, number))) is not None:
        if later.number != number:
            raise ValueError(
                f"{redact(_record(root, number))} must have its own number {number}, got {later.number}; "
                "correct it"
            )
        found = later
        number += 1
    if found and file_size(f"{found.export}/{FILES[-1]}") is None:
        raise ValueError(
            f"the promoted draft {redact(found.export)} is gone; put it back, or move "
            f"{redact(root)}/{POINTER} and promotions/ away to start again"
        )
    return found


@redact_secrets()
def restore_pointer(uri: str) -> Promoted | None:
    """The draft that is served now. Corrects promoted.json after a killed writer or a promotion by hand."""
    root = _root(uri)
    current = current_promotion(uri)
    if current and _read(f"{root}/{POINTER}") != current:
        write_bytes(f"{root}/{POINTER}", _to_json(current))
    return current


@redact_secrets()
def promote(uri: str, export_dir: str, new: Promoted) -> Promoted:
    """Keep a draft and make promoted.json name it.

    Args:
        export_dir: local directory of the draft, with FILES.
        new: its number is one above the promotion that it was compared with; its export is set here.

    Returns:
        This promotion. The same promotion again, after an attempt that was cut off, counts once.

    Raises:
        FileExistsError: if another draft was promoted meanwhile.
    """
    root = _root(uri)
    new = new.model_copy(update={"export": f"{root}/drafts/{new.digest}"})
    if not is_remote(root):
        Path(root, "promotions").mkdir(parents=True, exist_ok=True)
    _keep(export_dir, new.export)
    create_file(_record(root, new.number), _to_json(new))
    write_bytes(f"{root}/{POINTER}", _to_json(current_promotion(root) or new))
    return new


def _root(uri: str) -> str:
    return uri.rstrip("/") if is_remote(uri) else str(Path(uri).expanduser().resolve())


def _record(root: str, number: int) -> str:
    return f"{root}/promotions/{number:05d}.json"


def _to_json(promotion: Promoted) -> bytes:
    return promotion.model_dump_json(indent=1).encode()


def _read(uri: str) -> Promoted | None:
    text = read_bytes(uri)
    if text is None:
        return None
    try:
        return Promoted.model_validate(json.loads(text))
    except (ValueError, ValidationError) as e:
        raise ValueError(
            f"{redact(uri)} does not name a promoted draft ({e}); restore it from promotions/ next to it, "
            "or move it away"
        ) from e


def _keep(export_dir: str, kept_dir: str) -> None:
    """Copy the export's files, config.json last. A whole file stays, a damaged one is replaced."""
    if not is_remote(kept_dir):
        Path(kept_dir).mkdir(parents=True, exist_ok=True)
    for name in FILES:
        source = Path(export_dir) / name
        if file_size(f"{kept_dir}/{name}") != source.stat().st_size:
            copy_file(source, f"{kept_dir}/{name}")
