"""The size of a target from its config.json: parameters, bytes of weights, KV cache bytes per token."""

from dataclasses import dataclass
from typing import Any

from eagle3.targets.properties import DTYPE_BYTES

# Bytes per parameter of a quantised checkpoint: mxfp4 has 4 bits, and a scale byte for 32 parameters.
EXPERT_BYTES = {"mxfp4": 4.25 / 8, "fp8": 1.0}
LINEAR_BYTES = {"fp8": 1.0}
OWN_KEYS = ("architectures", "_name_or_path", "auto_map", "quantization_config", "torch_dtype", "dtype")


@dataclass(frozen=True)
class TargetSize:
    """Counts of a target.

    embedding_params: embedding and head. linear_params: attention, dense MLPs and routers. expert_params: all
    experts. active_params: those in the matrix products of one token, with the head. expert_bytes,
    linear_bytes: bytes per parameter of a quantised checkpoint, None if stored in the compute dtype.
    """

    num_layers: int
    hidden_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    embedding_params: int
    linear_params: int
    expert_params: int
    active_params: int
    expert_bytes: float | None = None
    linear_bytes: float | None = None

    @property
    def params(self) -> int:
        """All parameters without norms and biases."""
        return self.embedding_params + self.linear_params + self.expert_params

    def weight_bytes(self, dtype: str) -> float:
        """Bytes of the weights on all GPUs together."""
        param_bytes = DTYPE_BYTES[dtype]
        embeddings = self.embedding_params * param_bytes
        experts = self.expert_params * (self.expert_bytes or param_bytes)
        return embeddings + experts + self.linear_params * (self.linear_bytes or param_bytes)

    def key_value_bytes(self, dtype: str) -> int:
        """KV cache bytes per token; sliding windows count as full attention."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES[dtype]

    def prefill_flops(self, rows: float, tokens: float) -> float:
        """FLOPs to prefill `rows` rows of equal length with `tokens` tokens in all."""
        attention = 2 * self.num_layers * self.num_heads * self.head_dim * tokens**2 / max(rows, 1)
        return 2 * self.active_params * tokens + attention


def target_size(config: dict[str, Any]) -> TargetSize:
    """Count a supported target's parameters; the architecture's defaults complete config.json."""
    from transformers import AutoConfig

    c = AutoConfig.for_model(**{k: v for k, v in config.items() if k not in OWN_KEYS}).to_dict()
    width = c["hidden_size"]
    layers = c["num_hidden_layers"]
    heads = c["num_attention_heads"]
    kv_heads = c.get("num_key_value_heads") or heads
    head_dim = c.get("head_dim") or width // heads
    attention = 2 * width * head_dim * (heads + kv_heads)
    sparse = _num_sparse_layers(c)
    experts = c.get("num_local_experts") or c.get("num_experts") or 0
    chosen = c.get("num_experts_per_tok") or 0
    expert = 3 * width * (c.get("moe_intermediate_size") or c["intermediate_size"])
    dense_mlp = 3 * width * c["intermediate_size"]
    linear = layers * attention + (layers - sparse) * dense_mlp + sparse * experts * width
    table = c["vocab_size"] * width
    method = (config.get("quantization_config") or {}).get("quant_method", "")
    return TargetSize(
        num_layers=layers,
        hidden_size=width,
        vocab_size=c["vocab_size"],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        embedding_params=table if c.get("tie_word_embeddings") else 2 * table,
        linear_params=linear,
        expert_params=sparse * experts * expert,
        active_params=linear + sparse * chosen * expert + table,
        expert_bytes=EXPERT_BYTES.get(method),
        linear_bytes=LINEAR_BYTES.get(method),
    )


def _num_sparse_layers(c: dict[str, Any]) -> int:
    """Layers with experts instead of one MLP."""
    if not (c.get("num_local_experts") or c.get("num_experts")):
        return 0
    step = c.get("decoder_sparse_step") or 1
    dense = c.get("mlp_only_layers") or []
    return sum(i not in dense and (i + 1) % step == 0 for i in range(c["num_hidden_layers"]))


def check_tensor_parallel(size: TargetSize, num_gpus: int) -> None:
    """Refuse a tensor-parallel size that vLLM cannot split the attention heads by."""
    kv_fit = size.num_kv_heads % num_gpus == 0 or num_gpus % size.num_kv_heads == 0
    if size.num_heads % num_gpus or not kv_fit:
        raise ValueError(
            f"the target's {size.num_heads} attention and {size.num_kv_heads} key-value heads must be "
            f"divisible by fanout.tensor_parallel_size, got {num_gpus}; take a power of two up to "
            f"{size.num_heads & -size.num_heads}"
        )


def check_gpu_memory(
    size: TargetSize, dtype: str, max_model_len: int, num_gpus: int, usable_bytes: float, remedy: str
) -> None:
    """Refuse a target whose weights and KV cache of one longest sequence do not fit on its GPUs.

    usable_bytes: of each GPU, for the engine. remedy: settings to change, for the message.
    """
    weights = size.weight_bytes(dtype)
    cache = size.key_value_bytes(dtype) * max_model_len
    if weights + cache > num_gpus * usable_bytes:
        raise ValueError(
            f"the target's weights in {dtype} and the KV cache of one sequence of {max_model_len} tokens "
            f"must fit into {num_gpus} x {usable_bytes / 1e9:.0f} GB of GPU memory, they take "
            f"{weights / 1e9:.0f} + {cache / 1e9:.1f} GB; {remedy}"
        )
