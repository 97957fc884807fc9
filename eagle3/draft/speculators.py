"""The Speculators format: settings with their defaults, tensors by name and shape."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

# vLLM's defaults of absent flags (transformers_utils/configs/speculators/algos.py). Speculators' own default
# of norm_before_residual is False, but Speculators always writes it: a file without it was made for vLLM.
FLAG_DEFAULTS = {
    "norm_before_residual": True,
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
}
FLAGS = tuple(FLAG_DEFAULTS)

# Layers from which vLLM builds an EAGLE-3 draft (eagle3_arch_map, same file).
LAYER_TYPES = ("llama", "qwen3")

# RoPE types whose angles do not depend on max_position_embeddings.
UNBOUNDED_ROPE = ("default", "linear", "llama3")


def complete_config(
    content: dict[str, Any], target: dict[str, Any], default_layer_ids: list[int]
) -> dict[str, Any]:
    """Fill in the defaults of a draft's config.json.

    Args:
        target: config.json of its target.
        default_layer_ids: aux layers of a draft that names none.

    Returns:
        The content with every flag, `draft_vocab_size`, `target_hidden_size`, ascending aux layer ids, the
        target's architectures, and a `transformer_layer_config` with every key of the installed transformers
        and, where RoPE allows it, at least the target's max_position_embeddings.
    """
    layer = content.get("transformer_layer_config")
    if content.get("speculators_model_type") != "eagle3" or not isinstance(layer, dict):
        raise ValueError(
            "config.json must have speculators_model_type 'eagle3' and a transformer_layer_config, got "
            f"{content.get('speculators_model_type')!r} and {type(layer).__name__}; give a draft in the "
            "Speculators format"
        )
    for flag, default in FLAG_DEFAULTS.items():
        if not isinstance(content.get(flag, default), bool):
            raise ValueError(f"config.json: {flag} must be true or false, got {content[flag]!r}")
    layer = _complete_layer(layer, target)
    serving = content.get("speculators_config") or {}
    verifier = (serving.get("verifier") or {}) | {"architectures": target.get("architectures") or []}
    return content | {
        "transformer_layer_config": layer,
        "draft_vocab_size": content.get("draft_vocab_size") or layer["vocab_size"],
        "target_hidden_size": content.get("target_hidden_size") or layer["hidden_size"],
        "eagle_aux_hidden_state_layer_ids": sorted(
            content.get("eagle_aux_hidden_state_layer_ids") or default_layer_ids
        ),
        "speculators_config": serving | {"verifier": verifier},
        **{flag: content.get(flag, default) for flag, default in FLAG_DEFAULTS.items()},
    }


def _complete_layer(layer: dict[str, Any], target: dict[str, Any]) -> dict[str, Any]:
    from transformers import AutoConfig

    origin = ("_name_or_path", "transformers_version")
    drop = (*origin, "architectures", "auto_map", "torch_dtype", "dtype", "layer_types")
    kept = {"model_type": "llama"} | {k: v for k, v in layer.items() if k not in drop}
    kept |= {"num_hidden_layers": layer.get("num_hidden_layers", 1), "tie_word_embeddings": False}
    try:
        config: dict[str, Any] = AutoConfig.for_model(**kept).to_dict()
    except (ValueError, TypeError, KeyError) as e:
        raise ValueError(
            f"transformer_layer_config cannot be read ({e}); give a draft of one llama or qwen3 layer"
        ) from e
    if (config.get("rope_parameters") or {}).get("rope_type") in UNBOUNDED_ROPE:
        longest = max(config["max_position_embeddings"], target.get("max_position_embeddings", 0))
        config["max_position_embeddings"] = longest
    return {key: value for key, value in config.items() if key not in origin}


def expected_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that the engine needs for a config.json."""
    layer = config["transformer_layer_config"]
    num_aux = len(config["eagle_aux_hidden_state_layer_ids"])
    width, inner, heads = layer["hidden_size"], layer["intermediate_size"], layer["num_attention_heads"]
    head_dim = layer.get("head_dim") or width // heads
    query, key = heads * head_dim, layer["num_key_value_heads"] * head_dim
    target_width, draft_vocab_size = config["target_hidden_size"], config["draft_vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, num_aux * target_width),
        "layers.0.input_layernorm.weight": (width,),
        "layers.0.hidden_norm.weight": (width,),
        "layers.0.post_attention_layernorm.weight": (width,),
        "layers.0.self_attn.q_proj.weight": (query, 2 * width),
        "layers.0.self_attn.k_proj.weight": (key, 2 * width),
        "layers.0.self_attn.v_proj.weight": (key, 2 * width),
        "layers.0.self_attn.o_proj.weight": (width, query),
        "layers.0.mlp.gate_proj.weight": (inner, width),
        "layers.0.mlp.up_proj.weight": (inner, width),
        "layers.0.mlp.down_proj.weight": (width, inner),
        "norm.weight": (width,),
        "lm_head.weight": (draft_vocab_size, width),
    }
    if layer["model_type"] == "qwen3":
        shapes |= {f"layers.0.self_attn.{n}_norm.weight": (head_dim,) for n in "qk"}
    if config["norm_before_fc"]:
        shapes["input_norm.weight"] = (num_aux * target_width,)
    if config["fc_norm"]:
        shapes |= {f"fc_norm.{i}.weight": (target_width,) for i in range(num_aux)}
    if draft_vocab_size < layer["vocab_size"]:
        shapes |= {"d2t": (draft_vocab_size,), "t2d": (layer["vocab_size"],)}
    return shapes


def plain_name(name: str) -> str:
    """Name of a stored tensor in `expected_shapes`: older files call the layer `midlayer`."""
    return name.replace("midlayer.", "layers.0.")


def read_config(draft_dir: str | Path) -> dict[str, Any]:
    """Content of config.json."""
    path = Path(draft_dir) / "config.json"
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as e:
        raise ValueError(f"{path} is not readable ({e}); give a directory with a draft's config.json") from e
    return content


def read_shapes(draft_dir: str | Path) -> dict[str, tuple[int, ...]]:
    """Plain name and shape of every stored tensor, from the file's header."""
    path = Path(draft_dir) / "model.safetensors"
    try:
        with safe_open(path, framework="pt") as f:
            names = list(f.keys())
            return {plain_name(name): tuple(f.get_slice(name).get_shape()) for name in names}
    except (OSError, SafetensorError) as e:
        raise ValueError(f"{path} is not a complete safetensors file ({e}); fetch the draft again") from e


def read_target_ids(draft_dir: str | Path, draft_vocab_size: int) -> Tensor:
    """[K] int64: target id of each draft id; the identity without a d2t."""
    d2t = torch.zeros(draft_vocab_size, dtype=torch.int64)
    with safe_open(Path(draft_dir) / "model.safetensors", framework="pt") as f:
        if "d2t" in f.keys():  # noqa: SIM118 (safe_open is not a mapping)
            d2t = f.get_tensor("d2t").long()
    return torch.arange(len(d2t)) + d2t
