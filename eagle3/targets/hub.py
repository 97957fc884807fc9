"""The Hugging Face hub: find the commit of a revision, and download its files."""

import shutil
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from eagle3.errors import is_transient
from eagle3.uris import redact_secrets


@redact_secrets()
def hub_commit(what: str, name: str, revision: str, kind: Literal["model", "dataset"] = "model") -> str:
    """Find the current commit of `revision` ("": the default branch).

    `what` is the word for `name` in messages: "target", "initial draft" or "data set".

    Raises:
        ConnectionError: if a retry may succeed.
        ValueError: if a setting must change.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError

    api = HfApi()
    look_up = api.dataset_info if kind == "dataset" else api.model_info
    try:
        return str(look_up(name, revision=revision or None, timeout=20).sha)
    except (OSError, HFValidationError, *connection_errors()) as e:
        raise _hub_error(what, name, revision, e) from e


@redact_secrets()
def download_from_hub(
    what: str,
    name: str,
    revision: str,
    out_dir: str | Path,
    patterns: Sequence[str],
    ignored: Sequence[str] = (),
) -> None:
    """Download the files that match `patterns` and none of `ignored`; errors as in `hub_commit`."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        snapshot_download(
            name,
            revision=revision or None,
            local_dir=out_dir,
            allow_patterns=list(patterns),
            ignore_patterns=list(ignored),
        )
    except (OSError, HFValidationError, *connection_errors()) as e:
        raise _hub_error(what, name, revision, e) from e
    shutil.rmtree(Path(out_dir) / ".cache", ignore_errors=True)


def connection_errors() -> tuple[type[Exception], ...]:
    """The hub client's network errors, which are no OSErrors: from httpx, or httpx2 in newer releases."""
    return tuple(import_module(name).TransportError for name in ("httpx", "httpx2") if find_spec(name))


def _hub_error(what: str, name: str, revision: str, error: Exception) -> Exception:
    rule = f"{what} {name} (revision {revision or 'default'}) cannot be fetched from the hub"
    remedy = "check the id, the network and HF_TOKEN, or give a local copy"
    message = f"{rule}: {type(error).__name__}: {error}; {remedy}"
    return ConnectionError(message) if is_transient_hub_error(error) else ValueError(message)


def is_transient_hub_error(error: BaseException) -> bool:
    """Whether the hub may answer another try: the first HTTP status among the error and its causes decides.

    `datasets` and `huggingface_hub` wrap the hub's answer in errors of their own, some with `from None`.
    """
    from huggingface_hub.errors import OfflineModeIsEnabled

    errors = list(_with_causes(error))
    if any(isinstance(e, OfflineModeIsEnabled) for e in errors):
        return False
    statuses: list[int | None] = [getattr(getattr(e, "response", None), "status_code", None) for e in errors]
    if status := next(filter(None, statuses), None):
        return status == 429 or status >= 500
    return any(isinstance(e, connection_errors()) or is_transient(e) for e in errors)


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
