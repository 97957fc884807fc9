"""The draft that training starts from: resolve its name, fetch its files, check that it fits the target.

A name is a hub id, a directory, a URL that fsspec reads (s3://…), or runs/<run_name> of an earlier run on
this machine. The fetched copy is in the Speculators format and has all defaults filled in. Only JSON and
safetensors are read.
"""

import json
import logging
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eagle3.config.training import TrainConfig
from eagle3.draft.speculators import (
    FLAGS,
    LAYER_TYPES,
    complete_config,
    expected_shapes,
    read_config,
    read_shapes,
    read_target_ids,
)
from eagle3.files import copy_file, digest_of, file_sha256
from eagle3.targets.hub import download_from_hub, hub_commit
from eagle3.targets.properties import aux_layer_ids
from eagle3.targets.weights import LENGTH_DEPENDENT_ROPE
from eagle3.uris import redact, redact_secrets, uri_kind

logger = logging.getLogger(__name__)
FILES = ("config.json", "model.safetensors")
# The embedding is the target's; _tensor_faults checks the maps separately.
IGNORED_TENSORS = ("embed_tokens.weight", "t2d", "d2t")


@redact_secrets()
def resolve_initial(init_from: str, revision: str = "") -> tuple[str, str]:
    """Resolve `init_from` without fetching it.

    Returns:
        uri: hub id, absolute directory or URL, for `fetch_initial`.
        digest: hub commit, or digest of the files' content.
    """
    uri = _uri_of(init_from)
    if uri_kind(uri) == "hub":
        return uri, hub_commit("initial draft", uri, revision)
    if revision:
        logger.warning("train.init_revision %r is ignored: %s is not on the hub", revision, redact(init_from))
    return uri, _content_digest(uri)


@redact_secrets()
def fetch_initial(uri: str, digest: str, target: dict[str, Any], out_dir: str | Path) -> None:
    """Fetch the draft that `resolve_initial` found; `complete_config` fills in its config.json.

    Raises:
        ValueError: if the files are gone, have changed, or are no EAGLE-3 draft in the Speculators format.
    """
    out = Path(out_dir)
    _copy_files(uri, digest, out, FILES)
    if uri_kind(uri) != "hub" and _content_digest(str(out)) != digest:
        raise ValueError(f"initial draft {redact(uri)} changed during the run; run again")
    (out / "config.json").write_text(json.dumps(_completed(uri, out, target), indent=2))


@redact_secrets()
def read_settings(uri: str, digest: str, target: dict[str, Any]) -> dict[str, Any]:
    """The completed config.json alone, for an early check."""
    with tempfile.TemporaryDirectory() as out:
        _copy_files(uri, digest, Path(out), FILES[:1])
        return _completed(uri, Path(out), target)


def _copy_files(uri: str, digest: str, out: Path, names: Sequence[str]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    if uri_kind(uri) == "hub":
        download_from_hub("initial draft", uri, digest, out, names)
        return
    for name in names:
        with _naming_missing(uri, name):
            copy_file(f"{uri}/{name}", out / name)


def _completed(uri: str, copy: Path, target: dict[str, Any]) -> dict[str, Any]:
    try:
        return complete_config(read_config(copy), target, aux_layer_ids([], target["num_hidden_layers"]))
    except ValueError as e:
        raise ValueError(f"initial draft {redact(uri)}: {e}") from e


def check_initial(draft_dir: str | Path, target: dict[str, Any], layer_ids: list[int]) -> None:
    """Refuse a fetched draft that cannot be trained for this target on hidden states of these aux layers.

    Raises:
        ValueError: lists every fault of its settings or, if they fit, of its tensors.
    """
    config = read_config(draft_dir)
    check_settings(config, target, layer_ids)
    _refuse(_tensor_faults(draft_dir, config))


def check_settings(config: dict[str, Any], target: dict[str, Any], layer_ids: list[int]) -> None:
    """`check_initial` for a completed config.json alone."""
    _refuse(_setting_faults(config, target, layer_ids))


def _refuse(faults: Iterable[str]) -> None:
    if found := "; ".join(faults):
        raise ValueError(
            f"the draft of train.init_from does not fit: {found}; "
            "choose another draft, or none to start from scratch"
        )


def warn_of_overrides(draft_dir: str | Path, cfg: TrainConfig) -> None:
    """Warn of each flag that the initial draft overrides."""
    config = read_config(draft_dir)
    for flag in FLAGS:
        if config[flag] != getattr(cfg, flag):
            logger.warning("train.%s is ignored: the initial draft has %s", flag, str(config[flag]).lower())


def _setting_faults(config: dict[str, Any], target: dict[str, Any], layer_ids: list[int]) -> Iterator[str]:
    layer = config["transformer_layer_config"]
    wanted, of_target, own = target["hidden_size"], config["target_hidden_size"], layer["hidden_size"]
    if of_target != wanted or own != wanted:
        yield f"target_hidden_size and hidden_size must be {wanted}, got {of_target} and {own}"
    if layer["vocab_size"] != target["vocab_size"]:
        yield f"its layer must have the target's vocab_size {target['vocab_size']}, got {layer['vocab_size']}"
    if layer["model_type"] not in LAYER_TYPES or layer["num_hidden_layers"] != 1:
        yield f"it must be one llama or qwen3 layer, got {layer['num_hidden_layers']} {layer['model_type']!r}"
    if layer.get("attention_bias") or layer.get("mlp_bias") or layer.get("hidden_act", "silu") != "silu":
        yield "it must have neither attention_bias nor mlp_bias, and hidden_act silu"
    rope_type = (layer.get("rope_parameters") or {}).get("rope_type")
    if rope_type in LENGTH_DEPENDENT_ROPE:
        yield f"its {rope_type!r} RoPE depends on the length"
    if layer["max_position_embeddings"] < target.get("max_position_embeddings", 0):
        yield f"its max_position_embeddings {layer['max_position_embeddings']} is below the target's"
    aux_ids = config["eagle_aux_hidden_state_layer_ids"]
    if aux_ids != layer_ids:
        remedy = f"set extract.layer_ids to {aux_ids}"
        yield f"it reads aux layers {aux_ids}, the states hold {layer_ids} ({remedy})"
    if not 1 <= config["draft_vocab_size"] <= layer["vocab_size"]:
        yield f"draft_vocab_size must be 1 to {layer['vocab_size']}, got {config['draft_vocab_size']}"


def _tensor_faults(draft_dir: str | Path, config: dict[str, Any]) -> Iterator[str]:
    stored, wanted = read_shapes(draft_dir), expected_shapes(config)
    known = wanted.keys() | set(IGNORED_TENSORS)
    for name in sorted(stored.keys() - known):
        yield f"tensor {name} {list(stored[name])} does not belong to a draft of these settings"
    for name, shape in wanted.items():
        if name != "t2d" and stored.get(name) != shape:
            found = list(stored[name]) if name in stored else "none"
            yield f"tensor {name}: expected shape {list(shape)}, found {found}"
    if "d2t" in stored and stored["d2t"] == (config["draft_vocab_size"],):
        target_ids = read_target_ids(draft_dir, config["draft_vocab_size"])
        last = config["transformer_layer_config"]["vocab_size"] - 1
        if not (target_ids.diff() > 0).all() or int(target_ids[0]) < 0 or int(target_ids[-1]) > last:
            yield f"tensor d2t must map to ascending target ids from 0 to {last}"


def _uri_of(init_from: str) -> str:
    kind = uri_kind(init_from)
    if kind == "url":
        return init_from.rstrip("/")
    path = Path(init_from).expanduser()
    if (path / "summary.json").is_file():
        return _export_of(path / "summary.json")
    if path.is_dir():
        return str(path.resolve())
    if kind == "path" or init_from.startswith("runs/"):
        raise ValueError(
            f"train.init_from {init_from}: no such directory on this machine; correct it, or for a remote "
            "run give a hub id like org/draft or a URL like s3://bucket/draft: "
            "a pod cannot read your directories"
        )
    return init_from


def _export_of(summary_path: Path) -> str:
    try:
        export_dir = str(json.loads(summary_path.read_text())["export_dir"])
    except (ValueError, KeyError, TypeError) as e:
        raise ValueError(
            f"{summary_path} has no export_dir ({e!r}); finish that run, or give its draft's directory"
        ) from e
    if not Path(export_dir).is_dir():
        raise ValueError(f"{export_dir}, the draft of {summary_path}, is missing; run that recipe again")
    return export_dir


def _content_digest(uri: str) -> str:
    digests = []
    for name in FILES:
        with _naming_missing(uri, name):
            digests.append(file_sha256(f"{uri}/{name}"))
    return digest_of(*digests)


@contextmanager
def _naming_missing(uri: str, name: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as e:
        raise ValueError(
            f"initial draft {redact(uri)} has no {name}; give a draft in the Speculators format with its "
            "weights in one file"
        ) from e
