"""Sources of rows: their names, versions, files and rows.

A source is a hub data set `name[:subset]:split`, streamed through `datasets`, or a file or directory by path
or URL. All JSONL, JSON and Parquet files of a directory are read, sorted by path. Files and directories whose
names begin with a dot or an underscore are skipped.
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
from eagle3.files import digest_of, file_version, is_remote
from eagle3.targets.hub import connection_errors, hub_commit, is_transient_hub_error
from eagle3.uris import base_name, redact, redact_secrets, uri_kind

HUB_DATA_SET = re.compile(r"([\w.-]+(?:/[\w.-]+)?)(?::([\w.-]+))?:([\w.-]+)")
HIDDEN = re.compile(r"(^|/)[._]")
REFUSALS = (400, 401, 403)
NO_SCRIPTS = "Dataset scripts are no longer supported"  # the RuntimeError of datasets

logger = logging.getLogger(__name__)


def source_path(source: SourceConfig) -> str:
    return source.path or PRESETS[source.preset].path


def source_name(source: SourceConfig) -> str:
    """The source's name in rows and reports: no directory or query, so digests do not depend on them."""
    path = source_path(source)
    return source.name or (path if hub_parts(path) else base_name(path))


def without_paths(data: DataConfig) -> DataConfig:
    """The settings without paths, revisions and workers: cache keys have the sources' versions instead."""

    def without_path(source: SourceConfig) -> SourceConfig:
        name = source_name(source)
        return source.model_copy(update={"path": name, "name": name, "revision": ""})

    sources = [without_path(source) for source in data.sources]
    excluded = [without_path(source) for source in data.excluded]
    return data.model_copy(update={"sources": sources, "excluded": excluded, "workers": 0})


def hub_parts(path: str) -> tuple[str, str, str] | None:
    """(name, subset or "", split) of a hub data set; None for an existing path or a URL; else ValueError."""
    kind = uri_kind(path)
    if kind == "url" or Path(path).expanduser().exists():
        return None
    match = HUB_DATA_SET.fullmatch(path) if kind == "hub" and not file_format(path) else None
    if not match:
        raise ValueError(
            f"source {path}: no such file or directory, and not a hub data set; give a path, a URL or "
            "name[:subset]:split (a pod has no files of your machine but the shipped code)"
        )
    return match[1], match[2] or "", match[3]


@redact_secrets()
def source_version(source: SourceConfig) -> str:
    """Find a source's version: the hub commit, or a digest of the files (and their names in a directory).

    Raises:
        ValueError: if the source does not exist.
        ConnectionError: if a retry may succeed.
    """
    path = source_path(source)
    if parts := hub_parts(path):
        return hub_commit("data set", parts[0], source.revision, "dataset")
    filesystem, files, _ = _list_files(path)
    if len(files) == 1:
        return file_version(filesystem, files[0])
    return digest_of(*(part for f in files for part in (base_name(f), file_version(filesystem, f))))


def pin_sources(sources: Sequence[SourceConfig], versions: Sequence[str]) -> list[SourceConfig]:
    """Pin hub data sets to the commits that `source_version` found."""
    return [
        source.model_copy(update={"revision": version}) if hub_parts(source_path(source)) else source
        for source, version in zip(sources, versions, strict=True)
    ]


def read_source(source: SourceConfig) -> Iterator[Record]:
    """Stream a source's rows in order; errors as in `read_file`."""
    path = source_path(source)
    name = source_name(source)
    with redact_secrets():
        if parts := hub_parts(path):
            yield from _read_hub(*parts, source.revision, name)
            return
        filesystem, files, root = _list_files(path)
        for file in files:
            uri = file if isinstance(filesystem, LocalFileSystem) else filesystem.unstrip_protocol(file)
            yield from read_file(uri, f"{name}{_path_inside(file, root)}")


def _read_hub(repository: str, subset: str, split: str, revision: str, name: str) -> Iterator[Record]:
    import datasets

    number = 0
    try:
        rows = datasets.load_dataset(
            repository, subset or None, split=split, streaming=True, revision=revision or None
        )
        for number, row in enumerate(rows, 1):
            yield Record(f"{name}, row {number}", row)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError, *connection_errors()) as e:
        where = f"data set {repository}, {f'after row {number}' if number else 'first row'}"
        found = f"{where}: {type(e).__name__}: {e}"
        if is_transient_hub_error(e):
            raise ConnectionError(f"{found}; run again") from e
        if isinstance(e, RuntimeError):
            if NO_SCRIPTS not in str(e):
                raise
            remedy = "set the source's revision to refs/convert/parquet, if it exists, or give a local copy"
            raise ValueError(f"{found}; {remedy}") from e
        remedy = "check name, subset, split and HF_TOKEN, or give a local copy"
        raise ValueError(f"{found}; {remedy}") from e
    if not number:
        raise ValueError(f"data set {name} has no rows; name another split")


@redact_secrets()
def source_files(source: SourceConfig) -> tuple[Any, list[str]]:
    """The file system and files that `read_source` reads; none for a hub data set."""
    path = source_path(source)
    return (None, []) if hub_parts(path) else _list_files(path)[:2]


def _list_files(path: str) -> tuple[Any, list[str], str]:
    """(file system, files to read in order, path of the directory or of the one file)."""
    name = f"source {redact(path)}"
    try:
        filesystem, root = fsspec.url_to_fs(path if is_remote(path) else str(Path(path).expanduser()))
        if filesystem.isfile(root):
            return filesystem, [root], root
        found = sorted(filesystem.find(root))
    except (ConnectionError, TimeoutError):
        raise
    except (OSError, ValueError, ImportError) as e:
        raise ValueError(f"{name} cannot be read ({e}); give a readable file, directory or URL") from e
    except Exception as e:  # HTTP stores have errors of their own
        if getattr(e, "status", None) not in REFUSALS:
            raise
        raise ValueError(f"{name} is refused ({e}); give credentials, or a URL with a new signature") from e
    files = [file for file in found if file_format(file) and not HIDDEN.search(_path_inside(file, root))]
    if not files:
        raise ValueError(f"{name} has no JSONL, JSON or Parquet file; give a directory that holds some")
    if skipped := len(found) - len(files):
        logger.warning("%s: %d files of other formats or hidden are not read", name, skipped)
    return filesystem, files, root


def _path_inside(file: str, root: str) -> str:
    """A file's path relative to the listed directory, with its leading slash."""
    return redact(file)[len(redact(root)) :]
