"""Shape and flags of a draft, and how they follow from the target's config.json."""

from dataclasses import asdict, dataclass
from typing import Any

from eagle3.config.training import TrainConfig
from eagle3.draft.speculators import FLAGS, LAYER_TYPES

# Keys of a target's config.json that a draft's layer does not use.
NOT_OF_A_LAYER = ("architectures", "_name_or_path", "auto_map", "quantization_config", "torch_dtype", "dtype")
PER_LAYER = ("layer_types", "max_window_layers", "sliding_window", "use_sliding_window")
LLAMA_KEYS = (
    *("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("max_position_embeddings", "rope_parameters", "rms_norm_eps", "initializer_range"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)


@dataclass(frozen=True)
class DraftConfig:
    """Shape and flags of a draft; `to_dict` is draft.json.

    transformer_layer_config: Hugging Face config of the one layer, `model_type` llama or qwen3.
    draft_vocab_size: K. target_hidden_size: H of the target. eagle_aux_hidden_state_layer_ids: the ids of the
    A aux layers, ascending. target_architectures: as in the target's config.json.
    """

    transformer_layer_config: dict[str, Any]
    draft_vocab_size: int
    target_hidden_size: int
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    eagle_aux_hidden_state_layer_ids: list[int]
    target_architectures: list[str]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_target(
        cls, target: dict[str, Any], layer_ids: list[int], draft_vocab_size: int, cfg: TrainConfig
    ) -> "DraftConfig":
        """Derive the draft from the target's config.json."""
        return cls(
            transformer_layer_config=layer_config(target),
            draft_vocab_size=draft_vocab_size,
            target_hidden_size=target["hidden_size"],
            eagle_aux_hidden_state_layer_ids=layer_ids,
            target_architectures=target.get("architectures") or [],
            **{flag: getattr(cfg, flag) for flag in FLAGS},
        )


def layer_config(target: dict[str, Any]) -> dict[str, Any]:
    """Hugging Face config of the draft's one layer: a Qwen3 layer for a Qwen3 target, else a Llama layer.

    Width, heads and RoPE are the target's; attention is full, the MLP dense, and there are no biases.
    """
    from transformers import AutoConfig

    own = {key: value for key, value in target.items() if key not in NOT_OF_A_LAYER}
    if target["model_type"] in LAYER_TYPES:
        kept = {key: value for key, value in own.items() if key not in (*PER_LAYER, "model_type")}
        kept |= {"num_hidden_layers": 1, "tie_word_embeddings": False}
        kept |= {"attention_bias": False, "mlp_bias": False}
        return dict(AutoConfig.for_model(target["model_type"], **kept).to_dict())
    # The target's own class fills in defaults that its config.json omits, such as gpt-oss's RoPE.
    complete = AutoConfig.for_model(**own).to_dict()
    kept = {"num_hidden_layers": 1, "intermediate_size": _mlp_width(complete), "tie_word_embeddings": False}
    kept |= {key: complete[key] for key in LLAMA_KEYS if key in complete}
    return dict(AutoConfig.for_model("llama", **kept).to_dict())


def _mlp_width(target: dict[str, Any]) -> int:
    """Inner width of the draft's MLP: the target's, times the experts per token if the target is an MoE."""
    width = int(target.get("moe_intermediate_size") or target["intermediate_size"])
    return width * int(target.get("num_experts_per_tok") or 1)
