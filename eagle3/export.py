"""Write the directory that stock vLLM serves (Speculators format), after a check of every tensor.

vLLM loads a draft without `d2t`, `fc`, `lm_head` or `hidden_norm` silently, and then accepts no draft token.
So `verify_export` compares every tensor with what config.json implies. `embed_tokens` is left out: the engine
uses the target's. If the draft vocabulary is the whole target vocabulary, `d2t` and `t2d` are left out too:
the engine refuses a mapping then.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3.config.training import ExportConfig
from eagle3.draft.speculators import FLAGS, LAYER_TYPES, expected_shapes
from eagle3.files import atomic_path, digest_of, file_sha256
from eagle3.targets.weights import check_target_dir
from eagle3.uris import may_be_hub_id, redact, uri_kind
from eagle3.vocab import Vocab, load_vocab

FLOAT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def write_export(
    draft_dir: str | Path,
    vocab_path: str | Path,
    target_dir: str | Path,
    public_name: str,
    cfg: ExportConfig,
    out_dir: str | Path,
) -> str:
    """Write a draft as a directory for vLLM, which gets its name after it was verified and read back equal.

    Args:
        draft_dir: holds draft.json and draft.safetensors (names as in the export, float master weights).
        vocab_path: draft vocabulary.
        target_dir: directory of the target.
        public_name: the target's name for users; never a local path.
        cfg: default number of speculative tokens, dtype of the stored weights.
        out_dir: absent or empty.

    Returns:
        Content digest.

    Raises:
        ValueError: names the file, setting or tensor, the expected and the found value.
    """
    check_public_name(public_name)
    out = Path(out_dir)
    if out.exists() and any(out.iterdir()):
        raise ValueError(
            f"{out} must be absent or empty, it holds files; choose another directory or remove it yourself"
        )
    draft = _read_json(Path(draft_dir) / "draft.json")
    weights = _read_tensors(Path(draft_dir) / "draft.safetensors")
    tensors = {name: t.to(FLOAT_DTYPES[cfg.dtype]).contiguous() for name, t in weights.items()}
    vocab = load_vocab(vocab_path)
    _check_against_target(draft, check_target_dir(target_dir), target_dir)
    _check_vocab(vocab, draft, vocab_path)
    if len(vocab.d2t) < len(vocab.t2d):
        tensors |= {"d2t": vocab.d2t, "t2d": vocab.t2d}
    with atomic_path(out) as part:
        return _write_verified(part, export_config(draft, public_name, cfg), tensors)


def _write_verified(directory: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    """Make the directory with both files, read it back and check it; returns its digest."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    path = directory / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors writes for its owner only; a server is often another user
    digest = verify_export(directory)
    stored = _read_tensors(path)
    for name, tensor in tensors.items():
        if not torch.equal(stored[name], tensor):
            raise ValueError(
                f"{path}: tensor {name} reads back different from what was written; check the disk"
            )
    return digest


def export_config(draft: dict[str, Any], public_name: str, cfg: ExportConfig) -> dict[str, Any]:
    """Content of config.json; `draft` is the content of draft.json."""
    layer_ids = draft["eagle_aux_hidden_state_layer_ids"]
    layer = draft["transformer_layer_config"] | {"num_hidden_layers": 1, "tie_word_embeddings": False}
    for key in ("_name_or_path", "transformers_version"):
        layer.pop(key, None)
    if len(layer_ids) != 3:
        layer["num_aux_hidden_states"] = len(layer_ids)
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": cfg.num_speculative_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": public_name, "architectures": draft["target_architectures"]},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": draft["draft_vocab_size"],
        "target_hidden_size": draft["target_hidden_size"],
        "eagle_aux_hidden_state_layer_ids": layer_ids,
        **{flag: draft[flag] for flag in FLAGS},
        "tie_word_embeddings": False,
        "dtype": cfg.dtype,
    }


def check_public_name(name: str) -> None:
    """Refuse a name that is no hub id, such as a local path.

    Raises:
        ValueError: names the setting and what to give.
    """
    if uri_kind(name) != "hub":
        raise ValueError(
            f"the exported draft must name its target as others know it, got {redact(name)!r}; set "
            "target.public_name to a hub id such as org/model (a local path does not exist where the draft "
            "is served)"
        )


def verify_export(export_dir: str | Path) -> str:
    """Check an exported directory: its settings, then every tensor against the shapes that they imply.

    Returns:
        Content digest of config.json and model.safetensors.

    Raises:
        ValueError: lists every fault; for a tensor its name, its expected and its found shape.
    """
    path = Path(export_dir)
    config = _read_json(path / "config.json")
    faults = [f"config.json: {fault}" for fault in _config_faults(config)]
    if not faults:
        faults = list(_tensor_faults(config, _read_tensors(path / "model.safetensors")))
    if faults:
        raise ValueError(f"{path} would not serve as trained: {'; '.join(faults)}; delete it and run again")
    return digest_of(*(file_sha256(path / name) for name in ("config.json", "model.safetensors")))


def _config_faults(config: dict[str, Any]) -> Iterator[str]:
    """Yield the faults of config.json. A missing flag is one: engine and format have different defaults."""
    for flag in FLAGS:
        if not isinstance(config.get(flag), bool):
            yield f"{flag} must be true or false, got {config.get(flag)!r}"
    if config.get("speculators_model_type") != "eagle3":
        yield f"speculators_model_type must be eagle3, got {config.get('speculators_model_type')!r}"
    if config.get("tie_word_embeddings") is not False:
        yield "tie_word_embeddings must be false, the draft has its own head"
    if config.get("dtype") not in FLOAT_DTYPES:
        yield f"dtype must be one of {', '.join(FLOAT_DTYPES)}, got {config.get('dtype')!r}"
    try:
        proposal = config["speculators_config"]["proposal_methods"][0]
        verifier = config["speculators_config"]["verifier"]
        if proposal["speculative_tokens"] < 1 or not verifier["architectures"]:
            yield "speculative_tokens must be at least 1 and the verifier's architectures given"
        if not may_be_hub_id(verifier["name_or_path"] or ""):
            yield f"the verifier must have a public name, got {verifier['name_or_path']!r}"
        yield from _shape_setting_faults(config, config["transformer_layer_config"])
    except (KeyError, IndexError, TypeError) as e:
        yield f"a key is missing or has a value of the wrong kind ({e!r})"


def _shape_setting_faults(config: dict[str, Any], layer: dict[str, Any]) -> Iterator[str]:
    ids = config["eagle_aux_hidden_state_layer_ids"]
    num_aux = layer.get("num_aux_hidden_states", 3)
    if not ids or ids != sorted(set(ids)) or ids[0] < 0:
        yield f"aux layer ids must ascend from 0 or more, got {ids}"
    if num_aux != len(ids):
        yield f"transformer_layer_config.num_aux_hidden_states must be {len(ids)}, the engine reads {num_aux}"
    if layer["model_type"] not in LAYER_TYPES or layer["num_hidden_layers"] != 1:
        found = f"{layer['num_hidden_layers']} {layer['model_type']!r}"
        yield f"the draft must be one llama or qwen3 layer, got {found}"
    if layer.get("attention_bias") or layer.get("mlp_bias") or layer.get("tie_word_embeddings"):
        yield "attention_bias, mlp_bias and tie_word_embeddings of the draft layer must be false"
    if "rope_theta" not in (layer.get("rope_parameters") or {}):
        yield "transformer_layer_config must carry the trained rope_parameters with their rope_theta"
    width = config["target_hidden_size"]
    if width != layer["hidden_size"]:
        yield f"the draft must be as wide as its target ({width}), got {layer['hidden_size']}"
    draft_vocab_size = config["draft_vocab_size"]
    if not 1 <= draft_vocab_size <= layer["vocab_size"]:
        yield f"draft_vocab_size must be 1 to {layer['vocab_size']} (the target's), got {draft_vocab_size}"


def _tensor_faults(config: dict[str, Any], tensors: dict[str, Tensor]) -> Iterator[str]:
    shapes = expected_shapes(config)
    vocab_size = config["transformer_layer_config"]["vocab_size"]
    kinds = {"d2t": torch.int64, "t2d": torch.bool}
    for name in sorted(tensors.keys() - shapes.keys()):
        yield f"tensor {name} {list(tensors[name].shape)} is unknown to the engine"
    for name, shape in shapes.items():
        if name not in tensors:
            yield f"tensor {name} is missing, expected shape {list(shape)}, found none"
            continue
        tensor = tensors[name]
        kind = kinds.get(name, FLOAT_DTYPES[config["dtype"]])
        if tensor.shape != shape:
            yield f"tensor {name}: expected shape {list(shape)}, found {list(tensor.shape)}"
        elif tensor.dtype != kind:
            yield f"tensor {name} {list(shape)}: expected dtype {kind}, found {tensor.dtype}"
        elif name not in kinds and not torch.isfinite(tensor).all():
            yield f"tensor {name} {list(shape)} holds values that are not finite"
        elif name != "d2t" and not tensor.any():
            yield f"tensor {name} {list(shape)} is zero everywhere"
        elif name == "d2t":
            yield from _mapping_faults(tensor, tensors.get("t2d"), vocab_size)


def _mapping_faults(d2t: Tensor, t2d: Tensor | None, vocab_size: int) -> Iterator[str]:
    target_ids = torch.arange(len(d2t)) + d2t
    if not (target_ids.diff() > 0).all() or not 0 <= int(target_ids[0]) <= int(target_ids[-1]) < vocab_size:
        yield f"tensor d2t {list(d2t.shape)} must map to ascending target ids below {vocab_size}"
    elif t2d is not None and torch.nonzero(t2d).flatten().tolist() != target_ids.tolist():
        yield f"tensor t2d {list(t2d.shape)} marks other target ids than d2t maps to"


def _check_against_target(draft: dict[str, Any], target: dict[str, Any], target_dir: str | Path) -> None:
    layer = draft["transformer_layer_config"]
    longest = target.get("max_position_embeddings", 0)
    if layer["max_position_embeddings"] < longest:
        raise ValueError(
            f"the draft's max_position_embeddings must be at least the target's {longest}, "
            f"got {layer['max_position_embeddings']}; train it again for {target_dir}"
        )
    for key, found in (("hidden_size", draft["target_hidden_size"]), ("vocab_size", layer["vocab_size"])):
        if found != target[key]:
            raise ValueError(
                f"the draft was trained for a target with {key} {found}, {target_dir} has {target[key]}"
            )


def _check_vocab(vocab: Vocab, draft: dict[str, Any], vocab_path: str | Path) -> None:
    found = f"{len(vocab.d2t)} of {len(vocab.t2d)}"
    trained = f"{draft['draft_vocab_size']} of {draft['transformer_layer_config']['vocab_size']}"
    if found != trained:
        raise ValueError(
            f"{vocab_path} maps {found} tokens, the draft was trained for {trained}; "
            "export with the vocab of training or train again"
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as e:
        raise ValueError(f"{path} is not readable ({e}); delete its directory and run again") from e
    return content


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as e:
        raise ValueError(
            f"{path} is not a complete safetensors file ({e}); delete its directory and run again"
        ) from e
    return tensors
