"""Which model a name means: a hub id, a directory here or at a URL, or a GGUF file, identified and fetched into one directory."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any, Literal

import fsspec

from eagle3.config.engine import TargetConfig
from eagle3.files import copy_file, digest_of, file_sha256, file_version
from eagle3.targets.chat_template import put_chat_template, read_chat_template
from eagle3.targets.hub import download_from_hub, hub_commit
from eagle3.uris import base_name, redact, redact_secrets, uri_kind

logger = logging.getLogger(__name__)

# What an engine and a tokenizer read; weights in other formats and the authors' own copies in subdirectories stay behind.
FILE_PATTERNS = (
    "*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template.json", "*.jinja", "*.model",
)  # fmt: skip
IGNORED_PATTERNS = ("*/*", "consolidated*")
WEIGHT_PATTERN = "*.safetensors"
PODS_SEE = " (a pod sees the shipped code and no other path of your machine: give it a hub id or URL)"


def target_kind(name: str) -> Literal["hub", "directory", "url", "gguf"]:
    """Say what `name` is, and refuse a path that is not there or holds no model.

    Raises:
        ValueError: names the path and the remedy.
    """
    kind = uri_kind(name)
    if kind != "path":
        return kind
    path = Path(name).expanduser()
    if name.endswith(".gguf"):
        if not path.is_file():
            raise ValueError(f"target {name}: no such GGUF file; correct target.name{PODS_SEE}")
        return "gguf"
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(
                f"target {name} has no config.json; give the directory that save_pretrained wrote"
            )
        if not any(path.glob("*.safetensors")):
            raise ValueError(
                f"target {name} has no *.safetensors weights; save it with save_pretrained, or name a .gguf file"
            )
        return "directory"
    if path.exists():
        raise ValueError(
            f"target {name} is a file, but neither a directory nor a .gguf file; correct target.name"
        )
    raise ValueError(
        f"target {name}: no such directory; correct target.name, or give a hub id like org/model{PODS_SEE}"
    )


@redact_secrets()
def identify_target(cfg: TargetConfig) -> tuple[str, str, str]:
    """Find a target's identity without fetching it.

    Returns:
        name: hub id, or `public_name`, or the file or directory name, never a path.
        revision: hub commit, or the content digest of local files.
        digest: changes whenever the model's content does, or that of a chat template given beside it.

    Raises:
        ValueError: if the target is not there, or its chat template cannot be used; names it and the remedy.
    """
    name, revision, digest = _identify_model(cfg)
    return (
        name,
        revision,
        digest_of(digest, read_chat_template(cfg.chat_template)) if cfg.chat_template else digest,
    )


def _identify_model(cfg: TargetConfig) -> tuple[str, str, str]:
    kind = target_kind(cfg.name)
    if kind == "hub":
        commit = hub_commit("target", cfg.name, cfg.revision)
        return cfg.name, commit, digest_of(cfg.name, commit)
    if kind == "url":
        store, files_there = _files_at(cfg.name)
        digest = digest_of(*(part for f in files_there for part in (base_name(f), file_version(store, f))))
        return cfg.public_name or base_name(cfg.name), digest, digest
    path = Path(cfg.name).expanduser().resolve()
    files = [path] if kind == "gguf" else _model_files(path)
    names = ["gguf"] if kind == "gguf" else [f.name for f in files]  # a renamed GGUF file is the same model
    digest = digest_of(
        *(part for name, f in zip(names, files, strict=True) for part in (name, file_sha256(f)))
    )
    return cfg.public_name or path.name.removesuffix(".gguf"), digest, digest


@redact_secrets()
def fetch_target(cfg: TargetConfig, out_dir: str | Path) -> None:
    """Put config, tokenizer and safetensors weights into `out_dir`. For a hub id, pin `cfg.revision` to the commit found before.

    Raises:
        ValueError: if the target is not there or has no safetensors weights, or its chat template cannot be used; names it and
            the remedy.
    """
    template = read_chat_template(cfg.chat_template) if cfg.chat_template else ""
    out, kind = Path(out_dir), target_kind(cfg.name)
    out.mkdir(parents=True, exist_ok=True)
    if kind == "hub":
        download_from_hub("target", cfg.name, cfg.revision, out, FILE_PATTERNS, IGNORED_PATTERNS)
    elif kind == "url":
        for name in map(base_name, _files_at(cfg.name)[1]):
            copy_file(f"{cfg.name.rstrip('/')}/{name}", out / name)
    elif kind == "gguf":
        _convert_gguf(Path(cfg.name).expanduser().resolve(), out)
    else:
        for file in _model_files(Path(cfg.name).expanduser().resolve()):
            copy_file(file, out / file.name)
    if not any(out.glob("*.safetensors")):
        raise ValueError(
            f"target {redact(cfg.name)} has no *.safetensors weights; save it with save_pretrained and give that directory"
        )
    if template:
        put_chat_template(out, template)


@redact_secrets()
def fetch_tokenizer(cfg: TargetConfig, out_dir: str | Path) -> None:
    """Put what `fetch_target` does into `out_dir`, the weights left out: config, tokenizer, chat template; raises as it does."""
    template = read_chat_template(cfg.chat_template) if cfg.chat_template else ""
    out, kind = Path(out_dir), target_kind(cfg.name)
    out.mkdir(parents=True, exist_ok=True)
    if kind == "hub":
        patterns = [pattern for pattern in FILE_PATTERNS if pattern != WEIGHT_PATTERN]
        download_from_hub("target", cfg.name, cfg.revision, out, patterns, IGNORED_PATTERNS)
    elif kind == "url":
        for name in map(base_name, _files_at(cfg.name)[1]):
            if not Path(name).match(WEIGHT_PATTERN):
                copy_file(f"{cfg.name.rstrip('/')}/{name}", out / name)
    elif kind == "gguf":
        _convert_gguf(Path(cfg.name).expanduser().resolve(), out, with_weights=False)
    else:
        for file in _model_files(Path(cfg.name).expanduser().resolve()):
            if not file.match(WEIGHT_PATTERN):
                copy_file(file, out / file.name)
    if template:
        put_chat_template(out, template)


def _files_at(url: str) -> tuple[Any, list[str]]:
    """The file system of a directory's URL, and its model files, sorted.

    Raises:
        ValueError: if it holds no model that can be read.
    """
    try:
        store, root = fsspec.url_to_fs(url.rstrip("/"))
        found = [str(path) for path in store.ls(root, detail=False)]
    except (ConnectionError, TimeoutError):
        raise
    except (OSError, ValueError, ImportError) as e:
        raise ValueError(
            f"target {redact(url)} cannot be listed ({e}); give the URL of a directory that save_pretrained wrote"
        ) from e
    names = {base_name(path): path for path in found}
    wanted = [name for name in sorted(names) if any(fnmatch(name, pattern) for pattern in FILE_PATTERNS)]
    files = [names[name] for name in wanted if not fnmatch(name, "consolidated*")]
    if "config.json" not in names or not any(fnmatch(name, WEIGHT_PATTERN) for name in wanted):
        raise ValueError(
            f"target {redact(url)} has no config.json or no *.safetensors weights; give the directory that save_pretrained wrote"
        )
    return store, files


def _model_files(directory: Path) -> list[Path]:
    found = {
        f
        for pattern in FILE_PATTERNS
        for f in directory.glob(pattern)
        if f.is_file() and not f.match("consolidated*")
    }
    return sorted(found)


def _convert_gguf(path: Path, out: Path, with_weights: bool = True) -> None:
    """Dequantise to bfloat16 safetensors and rebuild config and tokenizer from the file's own metadata."""
    try:
        import accelerate  # noqa: F401
        import gguf  # noqa: F401
    except ImportError as e:
        raise ValueError(
            f"target {path} needs the packages gguf and accelerate; pip install 'eagle3-flyte[gguf]'"
        ) from e
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

    logger.info("converting %s to %s", path, "safetensors" if with_weights else "config and tokenizer")
    source: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
    with _gguf_read_once():
        if with_weights:
            model = AutoModelForCausalLM.from_pretrained(
                path.parent, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True), **source
            )
            model.save_pretrained(out)
        else:
            AutoConfig.from_pretrained(path.parent, **source).save_pretrained(out)
        AutoTokenizer.from_pretrained(path.parent, **source).save_pretrained(out)


@contextmanager
def _gguf_read_once() -> Iterator[None]:
    """Let transformers read a GGUF file once: it does so for the config, the weights and the tokenizer, element by element.

    For a vocabulary of 49k that takes most of the conversion; so does one name table for each module of the model.
    """
    import gguf
    import numpy as np

    class Reader(gguf.GGUFReader):  # type: ignore[misc]
        def __setattr__(self, name: str, value: Any) -> None:
            # Slices of a memmap cost five times those of a plain array on the same memory.
            object.__setattr__(self, name, value.view(np.ndarray) if name == "data" else value)

    names = ("GGUFReader", "get_tensor_name_map")
    originals = {name: getattr(gguf, name) for name in names}
    gguf.GGUFReader, gguf.get_tensor_name_map = cache(Reader), cache(gguf.get_tensor_name_map)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(gguf, name, original)
