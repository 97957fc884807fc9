"""Tiny random drafts and targets for tests: width 64, odd vocabularies, float64."""

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

VOCAB, DRAFT_VOCAB, WIDTH, INNER = 97, 41, 64, 75
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def layer_config(model_type: str = "llama", **changes: Any) -> dict[str, Any]:
    """`transformer_layer_config` of a draft: 4 query heads of 32 (wider than the model) on one key head
    unless changed.
    """
    config_class = {"llama": LlamaConfig, "qwen3": Qwen3Config}[model_type]
    sizes: dict[str, Any] = {
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    return config_class(**(sizes | changes)).to_dict()


def draft_config(layer: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """Content of draft.json; `changes` replace its keys."""
    config: dict[str, Any] = {
        "transformer_layer_config": layer or layer_config(),
        "draft_vocab_size": DRAFT_VOCAB,
        "target_hidden_size": WIDTH,
        "norm_before_residual": True,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        "target_architectures": ["LlamaForCausalLM"],
    }
    return config | changes


def draft_tensors(config: dict[str, Any], seed: int = 0, scale: float = 1.0) -> dict[str, Tensor]:
    """Random float64 tensors of draft.safetensors for `config`; norm gains around 1, so a lost gain shows."""
    layer, generator = config["transformer_layer_config"], torch.Generator().manual_seed(seed)
    width, inner, head = layer["hidden_size"], layer["intermediate_size"], layer["head_dim"]
    query, key = layer["num_attention_heads"] * head, layer["num_key_value_heads"] * head
    num_aux, target_width = len(config["eagle_aux_hidden_state_layer_ids"]), config["target_hidden_size"]
    matrices = {
        "fc": (width, num_aux * target_width),
        "layers.0.self_attn.q_proj": (query, 2 * width),
        "layers.0.self_attn.k_proj": (key, 2 * width),
        "layers.0.self_attn.v_proj": (key, 2 * width),
        "layers.0.self_attn.o_proj": (width, query),
        "layers.0.mlp.gate_proj": (inner, width),
        "layers.0.mlp.up_proj": (inner, width),
        "layers.0.mlp.down_proj": (width, inner),
        "lm_head": (config["draft_vocab_size"], width),
    }
    gains = {
        f"layers.0.{n}": width for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    } | {"norm": width}
    if layer["model_type"] == "qwen3":
        gains |= {"layers.0.self_attn.q_norm": head, "layers.0.self_attn.k_norm": head}
    if config["norm_before_fc"]:
        gains["input_norm"] = num_aux * target_width
    if config["fc_norm"]:
        gains |= {f"fc_norm.{i}": target_width for i in range(num_aux)}
    tensors = {}
    for name, shape in matrices.items():
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        tensors[f"{name}.weight"] = noise * scale / shape[1] ** 0.5
    for name, size in gains.items():
        tensors[f"{name}.weight"] = 1 + 0.3 * torch.randn(size, generator=generator, dtype=torch.float64)
    return tensors


def draft_mapping(
    vocab_size: int = VOCAB, draft_vocab_size: int = DRAFT_VOCAB, seed: int = 0
) -> dict[str, Tensor]:
    """Random `d2t` [K] int64 offsets and `t2d` [V] bool."""
    generator = torch.Generator().manual_seed(seed)
    target_ids = torch.randperm(vocab_size, generator=generator)[:draft_vocab_size].sort().values
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[target_ids] = True
    return {"d2t": target_ids - torch.arange(draft_vocab_size), "t2d": t2d}


def embedding(vocab_size: int = VOCAB, width: int = WIDTH, seed: int = 1) -> Tensor:
    """Random target embedding [V, H] float64."""
    return torch.randn(vocab_size, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def greedy_answer(
    model: PreTrainedModel, prompt: list[int], max_new_tokens: int, end: int
) -> tuple[list[int], str]:
    """What plain greedy decoding writes after a prompt, end token included, and why it ends there, in the
    engines' words.
    """
    answer: list[int] = []
    while len(answer) < max_new_tokens and answer[-1:] != [end]:
        with torch.no_grad():
            answer.append(int(model(torch.tensor([prompt + answer])).logits[0, -1].argmax()))
    return answer, "stop" if answer[-1:] == [end] else "length"


def tiny_target(
    model_type: str = "llama", vocab_size: int = VOCAB, seed: int = 0, **changes: Any
) -> PreTrainedModel:
    """Random four-layer target, float64, with weights large enough that its greedy answers vary."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": vocab_size,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    sizes |= changes
    if model_type == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**sizes)).double().eval()
    return LlamaForCausalLM(LlamaConfig(**sizes)).double().eval()
