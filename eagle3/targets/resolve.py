"""Identify and fetch a target: a hub id, a directory by path or URL, or a GGUF file."""

from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal

import fsspec

from eagle3.config.engine import TargetConfig
from eagle3.files import copy_file, digest_of, file_sha256, file_version
from eagle3.targets.chat_template import put_chat_template, read_chat_template
from eagle3.targets.gguf import convert_gguf
from eagle3.targets.hub import download_from_hub, hub_commit
from eagle3.uris import base_name, redact, redact_secrets, uri_kind

WEIGHT_PATTERN = "*.safetensors"
# Files that an engine and a tokenizer read; not weights in other formats.
SMALL_FILE_PATTERNS = (
    "*.safetensors.index.json", "config.json", "generation_config.json", "tokenizer*",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.json",
    "*.jinja", "*.model",
)  # fmt: skip
FILE_PATTERNS = (WEIGHT_PATTERN, *SMALL_FILE_PATTERNS)
IGNORED_PATTERNS = ("*/*", "consolidated*")
PODS_SEE = " (a pod has the shipped code but no other path of your machine: give it a hub id or URL)"


def target_kind(name: str) -> Literal["hub", "directory", "url", "gguf"]:
    """The kind of a target's name; ValueError for a path without a model."""
    kind = uri_kind(name)
    if kind != "path":
        return kind
    path = Path(name).expanduser()
    if name.endswith(".gguf"):
        if not path.is_file():
            raise ValueError(f"target {name}: no such GGUF file; correct target.name{PODS_SEE}")
        return "gguf"
    if not path.exists():
        remedy = f"correct target.name, or give a hub id like org/model{PODS_SEE}"
        raise ValueError(f"target {name}: no such directory; {remedy}")
    if not path.is_dir():
        raise ValueError(f"target {name} is a file, but not a .gguf file; correct target.name")
    if not (path / "config.json").is_file():
        raise ValueError(f"target {name} has no config.json; give the directory that save_pretrained wrote")
    if not any(path.glob(WEIGHT_PATTERN)):
        remedy = "save it with save_pretrained, or name a .gguf file"
        raise ValueError(f"target {name} has no *.safetensors weights; {remedy}")
    return "directory"


@redact_secrets()
def identify_target(cfg: TargetConfig) -> tuple[str, str, str]:
    """Find a target's identity without fetching it.

    Returns:
        name: hub id, `public_name`, or the name of the file or directory, never a path.
        revision: hub commit, or the digest of the files.
        digest: of the model's content and the recipe's chat template.
    """
    name, revision, digest = _identify_model(cfg)
    if cfg.chat_template:
        digest = digest_of(digest, read_chat_template(cfg.chat_template))
    return name, revision, digest


def _identify_model(cfg: TargetConfig) -> tuple[str, str, str]:
    kind = target_kind(cfg.name)
    if kind == "hub":
        commit = hub_commit("target", cfg.name, cfg.revision)
        return cfg.name, commit, digest_of(cfg.name, commit)
    if kind == "url":
        store, paths = _list_url(cfg.name)
        parts = [part for path in paths for part in (base_name(path), file_version(store, path))]
    elif kind == "gguf":
        parts = ["gguf", file_sha256(_local_path(cfg))]  # a renamed GGUF file is the same model
    else:
        parts = [part for path in _list_directory(cfg) for part in (path.name, file_sha256(path))]
    digest = digest_of(*parts)
    name = base_name(cfg.name) if kind == "url" else _local_path(cfg).name.removesuffix(".gguf")
    return cfg.public_name or name, digest, digest


@redact_secrets()
def fetch_target(cfg: TargetConfig, out_dir: str | Path) -> None:
    """Put config, tokenizer, chat template and safetensors weights into `out_dir`.

    For a hub id `cfg` has the revision that `identify_target` found.
    """
    _fetch(cfg, Path(out_dir), FILE_PATTERNS)
    if not any(Path(out_dir).glob(WEIGHT_PATTERN)):
        remedy = "save it with save_pretrained and give that directory"
        raise ValueError(f"target {redact(cfg.name)} has no *.safetensors weights; {remedy}")


@redact_secrets()
def fetch_tokenizer(cfg: TargetConfig, out_dir: str | Path) -> None:
    """As `fetch_target`, without the weights."""
    _fetch(cfg, Path(out_dir), SMALL_FILE_PATTERNS)


def _fetch(cfg: TargetConfig, out_dir: Path, patterns: Sequence[str]) -> None:
    template = read_chat_template(cfg.chat_template) if cfg.chat_template else ""
    kind = target_kind(cfg.name)
    out_dir.mkdir(parents=True, exist_ok=True)
    if kind == "hub":
        download_from_hub("target", cfg.name, cfg.revision, out_dir, patterns, IGNORED_PATTERNS)
    elif kind == "gguf":
        convert_gguf(_local_path(cfg), out_dir, with_weights=WEIGHT_PATTERN in patterns)
    else:
        directory = cfg.name.rstrip("/") if kind == "url" else str(_local_path(cfg))
        paths = _list_url(cfg.name)[1] if kind == "url" else map(str, _list_directory(cfg))
        for name in map(base_name, paths):
            if any(fnmatch(name, pattern) for pattern in patterns):
                copy_file(f"{directory}/{name}", out_dir / name)
    if template:
        put_chat_template(out_dir, template)


def _local_path(cfg: TargetConfig) -> Path:
    return Path(cfg.name).expanduser().resolve()


def _is_model_file(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in FILE_PATTERNS) and not fnmatch(name, "consolidated*")


def _list_directory(cfg: TargetConfig) -> list[Path]:
    return sorted(path for path in _local_path(cfg).iterdir() if path.is_file() and _is_model_file(path.name))


def _list_url(url: str) -> tuple[Any, list[str]]:
    """The file system of a directory's URL, and its model files, sorted by name."""
    remedy = "give the URL of a directory that save_pretrained wrote"
    try:
        store, root = fsspec.url_to_fs(url.rstrip("/"))
        path_of = {base_name(str(path)): str(path) for path in store.ls(root, detail=False)}
    except (ConnectionError, TimeoutError):
        raise
    except (OSError, ValueError, ImportError) as e:
        raise ValueError(f"target {redact(url)} cannot be listed ({e}); {remedy}") from e
    if "config.json" not in path_of or not any(fnmatch(name, WEIGHT_PATTERN) for name in path_of):
        raise ValueError(f"target {redact(url)} has no config.json or no *.safetensors weights; {remedy}")
    return store, [path_of[name] for name in sorted(path_of) if _is_model_file(name)]
