"""Sources of rows: what a SourceConfig names, which version of it is meant, and its rows in order.

A place is a hub data set `name[:subset]:split`, streamed through `datasets`, or a file or directory, here or
at a URL. Of a directory all JSONL, JSON and Parquet files are read, sorted by path; files that begin with a
dot or an underscore are not.
"""

import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from eagle3.config.data import DataConfig, SourceConfig
from eagle3.data.files import Record, file_format, read_file
from eagle3.data.presets import PRESETS
from eagle3.files import digest_of, file_version
from eagle3.targets.hub import connection_errors, hub_commit
from eagle3.uris import base_name, redact, redact_secrets, uri_kind

HUB_PLACE = re.compile(r"([\w.-]+(?:/[\w.-]+)?)(?::([\w.-]+))?:([\w.-]+(?:\[[\w:%-]*\])?)")
REFUSALS = (400, 401, 403)

logger = logging.getLogger(__name__)


def source_path(source: SourceConfig) -> str:
    """The place that is read: the source's own path, or its preset's."""
    return source.path or PRESETS[source.preset].path


def source_name(source: SourceConfig) -> str:
    """What rows and report call a source; free of directories and queries, so that digests do not depend on them."""
    path = source_path(source)
    return source.name or (path if hub_parts(path) else base_name(path))


def without_places(data: DataConfig) -> DataConfig:
    """The settings that decide what is made of the sources: where they lie, and how many processes read them, does not.

    What is read stands in keys as the sources' versions.
    """

    def without_place(source: SourceConfig) -> SourceConfig:
        return source.model_copy(
            update={"path": source_name(source), "name": source_name(source), "revision": ""}
        )

    sources, excluded = (list(map(without_place, found)) for found in (data.sources, data.excluded))
    return data.model_copy(update={"sources": sources, "excluded": excluded, "workers": 0})


def hub_parts(path: str) -> tuple[str, str, str] | None:
    """(name, subset or empty, split) of a hub data set; None for files, directories and URLs.

    Raises:
        ValueError: if it is neither.
    """
    kind = uri_kind(path)
    if kind == "url" or Path(path).expanduser().exists():
        return None
    match = HUB_PLACE.fullmatch(path) if kind == "hub" and not file_format(path) else None
    if not match:
        raise ValueError(
            f"source {path}: no such file or directory, and not a hub data set; give a path, a URL or name[:subset]:split "
            "(pods see no files but URLs and the code's)"
        )
    return match[1], match[2] or "", match[3]


@redact_secrets()
def resolve_source(source: SourceConfig) -> tuple[str, str]:
    """Find a source's place and version, as of now, without reading rows.

    Returns:
        place: hub data set, path or URL.
        version: the hub commit, or a digest over the content of all files, their names in a directory
            included.

    Raises:
        ValueError: if there is no such source; names it and the remedy.
        ConnectionError: where another try may help.
    """
    path = source_path(source)
    if parts := hub_parts(path):
        return path, hub_commit("data set", parts[0], source.revision, "dataset")
    filesystem, files, _ = _list_files(path)
    if len(files) == 1:
        return path, file_version(filesystem, files[0])
    names = list(map(base_name, files))
    versions = [file_version(filesystem, file) for file in files]
    return path, digest_of(*(part for pair in zip(names, versions, strict=True) for part in pair))


def pin_sources(sources: Sequence[SourceConfig], versions: Sequence[str]) -> list[SourceConfig]:
    """The same sources at the versions that `resolve_source` found: a branch that moves meanwhile changes nothing."""
    pinned = []
    for source, version in zip(sources, versions, strict=True):
        pinned.append(
            source.model_copy(update={"revision": version}) if hub_parts(source_path(source)) else source
        )
    return pinned


def read_source(source: SourceConfig) -> Iterator[Record]:
    """Stream a source's rows in order.

    Raises:
        ValueError: if it cannot be read as a whole (eagle3/data/files.py); names file, row and remedy.
    """
    path, name = source_path(source), source_name(source)
    with redact_secrets():
        if parts := hub_parts(path):
            yield from _read_hub(*parts, source.revision, name)
            return
        filesystem, files, root = _list_files(path)
        for file in files:
            place = file if isinstance(filesystem, LocalFileSystem) else filesystem.unstrip_protocol(file)
            yield from read_file(place, f"{name}{_inside(file, root)}")


def _read_hub(repository: str, subset: str, split: str, revision: str, name: str) -> Iterator[Record]:
    import datasets

    number = 0
    try:
        rows = datasets.load_dataset(
            repository, subset or None, split=split, streaming=True, revision=revision or None
        )
        for number, row in enumerate(rows, 1):
            yield Record(f"{name}, row {number}", row)
    except (ConnectionError, TimeoutError):
        raise
    except connection_errors() as e:
        raise ConnectionError(
            f"data set {repository}, behind row {number}: {type(e).__name__}: {e}; run again"
        ) from e
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as e:
        raise ValueError(
            f"data set {repository}, {f'behind row {number}' if number else 'first row'}: {type(e).__name__}: {e}; check name, "
            "subset, split and HF_TOKEN, or give a local copy"
        ) from e
    if not number:
        raise ValueError(f"data set {name} has no rows; name another split")


def _list_files(path: str) -> tuple[Any, list[str], str]:
    """(file system, files to read in order, the directory's path or the single file's)."""
    try:
        filesystem, root = fsspec.url_to_fs(path if "://" in path else str(Path(path).expanduser()))
        if filesystem.isfile(root):
            return filesystem, [root], root
        found = sorted(filesystem.find(root))
    except (ConnectionError, TimeoutError):
        raise
    except (OSError, ValueError, ImportError) as e:
        raise ValueError(
            f"source {redact(path)} cannot be read ({e}); give a readable file, directory or URL"
        ) from e
    except Exception as e:  # HTTP stores' answers are errors of their own
        if getattr(e, "status", None) not in REFUSALS:
            raise
        raise ValueError(
            f"source {redact(path)} is refused ({e}); give credentials, or a URL that is signed anew"
        ) from e
    hidden = [f for f in found if any(part.startswith((".", "_")) for part in _inside(f, root).split("/"))]
    files = [f for f in found if file_format(f) and f not in hidden]
    if not files:
        raise ValueError(
            f"source {redact(path)} has no JSONL, JSON or Parquet file; give a directory that holds some"
        )
    if skipped := len(found) - len(files):
        logger.warning("source %s: %d files of other formats or hidden are not read", redact(path), skipped)
    return filesystem, files, root


def _inside(file: str, root: str) -> str:
    """A file's path in the directory that was listed."""
    return redact(file)[len(redact(root)) :]


@redact_secrets()
def source_files(source: SourceConfig) -> tuple[Any, list[str]]:
    """File system and files that `read_source` reads, in order; none for a hub data set."""
    path = source_path(source)
    if hub_parts(path):
        return None, []
    filesystem, files, _ = _list_files(path)
    return filesystem, files
