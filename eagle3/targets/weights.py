"""Read the target tensors that training needs from the safetensors files, without building the model."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

# Architectures with logits = head(RMSNorm(last hidden state)), without scales or caps, and with aux states in
# vLLM 0.32 (SupportsEagle3). Not Gemma: its gain is 1 + w, and its embedding is scaled.
SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gpt_oss")
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True)
class TargetTensors:
    """Parts of the target that the draft uses.

    config: config.json. embedding: [V, H]. norm_weight: [H] gain of the final RMSNorm. norm_eps: its epsilon.
    head: [V, H], the same tensor as the embedding if tied.
    """

    config: dict[str, Any]
    embedding: Tensor
    norm_weight: Tensor
    norm_eps: float
    head: Tensor


def check_target_dir(target_dir: str | Path) -> dict[str, Any]:
    """Read config.json; ValueError if there are no weights, or no draft can be built for the architecture."""
    root = Path(target_dir)
    config = read_config(root, root)
    if not any(root.glob("*.safetensors")):
        remedy = "save it with save_pretrained, or give a hub id or .gguf file"
        raise ValueError(f"{root} holds no *.safetensors file; {remedy}")
    check_target_config(config, root)
    return config


def read_config(target_dir: str | Path, name: str | Path) -> dict[str, Any]:
    """Read a target's config.json; `name` is the target in the error message."""
    try:
        config: dict[str, Any] = json.loads((Path(target_dir) / "config.json").read_text())
    except (OSError, ValueError) as e:
        remedy = "give a model directory, hub id or .gguf file"
        raise ValueError(f"{name} holds no readable config.json ({e}); {remedy}") from e
    return config


def check_target_config(config: dict[str, Any], name: str | Path) -> None:
    """Refuse a config.json for which no draft can be built; `name` is the target in the error message."""
    if config.get("model_type") not in SUPPORTED_MODEL_TYPES:
        raise ValueError(
            f"{name} is a {config.get('model_type')!r} model; drafts can be trained for "
            f"{', '.join(SUPPORTED_MODEL_TYPES)} targets: embedding, final norm and head must be the plain "
            "ones of these; choose another target"
        )
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if (kind := rope.get("rope_type") or rope.get("type")) in LENGTH_DEPENDENT_ROPE:
        remedy = "no draft can be trained for it yet"
        raise ValueError(f"{name} uses {kind!r} RoPE, whose angles depend on the length; {remedy}")


def load_target_tensors(target_dir: str | Path, dtype: torch.dtype = torch.float32) -> TargetTensors:
    """Load embedding, final norm and head, converted to `dtype`; the other tensors may be quantised."""
    config = check_target_dir(target_dir)
    files = _tensor_files(target_dir)
    shape = (config["vocab_size"], config["hidden_size"])
    embedding = _read_floats(target_dir, files, "model.embed_tokens.weight", shape).to(dtype)
    norm_weight = _read_floats(target_dir, files, "model.norm.weight", shape[1:]).to(dtype)
    tied = config.get("tie_word_embeddings", False)
    head = embedding if tied else _read_floats(target_dir, files, "lm_head.weight", shape).to(dtype)
    return TargetTensors(config, embedding, norm_weight, config["rms_norm_eps"], head)


def _tensor_files(target_dir: str | Path) -> dict[str, Path]:
    """Map each tensor name to its file, from the index or the file headers."""
    root = Path(target_dir)
    if (root / INDEX_NAME).exists():
        weight_map = json.loads((root / INDEX_NAME).read_text())["weight_map"]
        return {name: root / Path(file).name for name, file in weight_map.items()}
    files = {}
    for path in sorted(root.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as f:
                files.update(dict.fromkeys(f.keys(), path))
        except SafetensorError as e:
            rule = f"{path} is not a complete safetensors file ({e})"
            raise ValueError(f"{rule}; fetch the target again") from e
    return files


def _read_floats(target_dir: str | Path, files: dict[str, Path], name: str, shape: tuple[int, ...]) -> Tensor:
    if name not in files:
        remedy = "the files are incomplete, fetch the target again"
        raise ValueError(f"{target_dir} has no tensor {name!r}; {remedy}")
    with safe_open(files[name], framework="pt") as f:
        tensor: Tensor = f.get_tensor(name)
    if tensor.dtype not in FLOAT_DTYPES:
        rule = "embedding, final norm and head must not be quantised"
        found = f"{name} is stored as {tensor.dtype}"
        raise ValueError(f"{target_dir}: {found}; {rule}, take a target that keeps them in bfloat16")
    if tensor.shape != shape:
        found = f"{name} has shape {tuple(tensor.shape)}, config.json has {shape}"
        raise ValueError(f"{target_dir}: {found}; fetch the target again")
    return tensor
