"""The draft: fc over the target's aux states, one decoder layer (Qwen3's for Qwen3 targets, else Llama's), norm, head.

Parameter names are those of the exported checkpoint. The layer follows vLLM's `llama_eagle3.py` and `qwen3_eagle3.py`:

    g = fc(aux)                                     first step; later steps feed the state below back instead
    e = RMS_in(embed); n = RMS_hidden(g); r = n if norm_before_residual else g
    r = r + Attention([e; n]);  pre = r + MLP(RMS_post(r));  logits = lm_head(RMS_norm(pre));  fed back: pre, or its norm
"""

import logging
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from eagle3.config.training import TrainConfig
from eagle3.draft.speculators import LAYER_TYPES, plain_name, read_config, read_target_ids
from eagle3.targets.weights import TargetTensors

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DraftConfig:
    """Shape and flags of a draft; `to_dict` is draft.json.

    transformer_layer_config: Hugging Face config of the one layer, `model_type` llama or qwen3. draft_vocab_size: K.
    target_hidden_size: H of the target. eagle_aux_hidden_state_layer_ids: A ids, ascending. target_architectures: as in the
    target's config.json.
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
        """Derive the draft from the target's config.json: same width, heads and RoPE, one layer, no biases, untied head."""
        return cls(
            transformer_layer_config=layer_config(target),
            draft_vocab_size=draft_vocab_size,
            target_hidden_size=target["hidden_size"],
            norm_before_residual=cfg.norm_before_residual,
            norm_before_fc=cfg.norm_before_fc,
            fc_norm=cfg.fc_norm,
            norm_output=cfg.norm_output,
            eagle_aux_hidden_state_layer_ids=layer_ids,
            target_architectures=target.get("architectures") or [],
        )


def layer_config(target: dict[str, Any]) -> dict[str, Any]:
    """Hugging Face config of the draft's one layer, from the target's: a Qwen3 layer for a Qwen3 target, else a Llama layer."""
    from transformers import AutoConfig

    if target["model_type"] not in LAYER_TYPES:
        return _llama_layer_config(target)
    per_layer = ("layer_types", "max_window_layers", "sliding_window", "use_sliding_window")
    drop = (
        *per_layer,
        "model_type",
        "architectures",
        "_name_or_path",
        "auto_map",
        "quantization_config",
        "torch_dtype",
        "dtype",
    )
    kept = {k: v for k, v in target.items() if k not in drop}
    kept |= {"num_hidden_layers": 1, "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False}
    config: dict[str, Any] = AutoConfig.for_model(target["model_type"], **kept).to_dict()
    return config


def _llama_layer_config(target: dict[str, Any]) -> dict[str, Any]:
    """A Llama layer of the target's width, heads and RoPE; full attention, a dense MLP, no biases."""
    from transformers import AutoConfig

    # The target's own class fills in what its config.json leaves to defaults, such as gpt-oss's RoPE.
    own = ("architectures", "_name_or_path", "auto_map", "quantization_config", "torch_dtype", "dtype")
    whole = AutoConfig.for_model(**{k: v for k, v in target.items() if k not in own}).to_dict()
    sizes = (
        "vocab_size",
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
    )
    others = (
        "rope_parameters",
        "rms_norm_eps",
        "initializer_range",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    )
    config: dict[str, Any] = AutoConfig.for_model(
        "llama",
        num_hidden_layers=1,
        intermediate_size=_mlp_width(whole),
        tie_word_embeddings=False,
        **{key: whole[key] for key in (*sizes, *others) if key in whole},
    ).to_dict()
    return config


def _mlp_width(target: dict[str, Any]) -> int:
    """Inner width of the draft's MLP: the target's, or that of all the experts that one token passes together."""
    width = int(target.get("moe_intermediate_size") or target["intermediate_size"])
    return width * int(target.get("num_experts_per_tok") or 1)


class RotaryTable(nn.Module):
    """RoPE angles of a Hugging Face config, scaled kinds that do not depend on the length included; angles in float32."""

    def __init__(self, layer: dict[str, Any]) -> None:
        super().__init__()
        from transformers import AutoConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        table = LlamaRotaryEmbedding(AutoConfig.for_model(**layer))
        self.register_buffer("inv_freq", table.inv_freq.float(), persistent=False)
        self.scaling = float(table.attention_scaling)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate x [L, heads, D] at integer positions [L]; halves are paired as in Llama."""
        angles = positions.float()[:, None] * self.get_buffer("inv_freq").float()
        angles = torch.cat([angles, angles], -1)[:, None]
        cos, sin = (angles.cos() * self.scaling).to(x.dtype), (angles.sin() * self.scaling).to(x.dtype)
        left, right = x.chunk(2, -1)
        return x * cos + torch.cat([-right, left], -1) * sin


class DraftAttention(nn.Module):
    """Projections of the layer's attention; the attention itself is draft/attention.py."""

    def __init__(self, layer: dict[str, Any]) -> None:
        super().__init__()
        hidden, eps = layer["hidden_size"], layer["rms_norm_eps"]
        self.num_heads, self.num_groups = layer["num_attention_heads"], layer["num_key_value_heads"]
        self.size = layer.get("head_dim") or hidden // self.num_heads
        self.q_proj = nn.Linear(2 * hidden, self.num_heads * self.size, bias=False)
        self.k_proj = nn.Linear(2 * hidden, self.num_groups * self.size, bias=False)
        self.v_proj = nn.Linear(2 * hidden, self.num_groups * self.size, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.size, hidden, bias=False)
        per_head_norm = layer["model_type"] == "qwen3"
        self.q_norm: nn.Module = nn.RMSNorm(self.size, eps=eps) if per_head_norm else nn.Identity()
        self.k_norm: nn.Module = nn.RMSNorm(self.size, eps=eps) if per_head_norm else nn.Identity()

    def queries(self, x: Tensor, positions: Tensor, rope: RotaryTable) -> Tensor:
        """x [L, 2H], positions [L] -> [L, N, D]."""
        rotated: Tensor = rope(self.q_norm(self.q_proj(x).view(-1, self.num_heads, self.size)), positions)
        return rotated

    def keys_values(self, x: Tensor, positions: Tensor, rope: RotaryTable) -> tuple[Tensor, Tensor]:
        """x [L, 2H], positions [L] -> two [L, G, D]."""
        keys = rope(self.k_norm(self.k_proj(x).view(-1, self.num_groups, self.size)), positions)
        return keys, self.v_proj(x).view(-1, self.num_groups, self.size)


class DraftMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, layer: dict[str, Any]) -> None:
        super().__init__()
        hidden, inner = layer["hidden_size"], layer["intermediate_size"]
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DraftLayer(nn.Module):
    """The one decoder layer: two input norms, attention over [embedding; hidden], MLP."""

    def __init__(self, layer: dict[str, Any], norm_before_residual: bool) -> None:
        super().__init__()
        hidden, eps = layer["hidden_size"], layer["rms_norm_eps"]
        self.norm_before_residual = norm_before_residual
        self.input_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.hidden_norm = nn.RMSNorm(hidden, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.self_attn = DraftAttention(layer)
        self.mlp = DraftMLP(layer)

    def attention_input(self, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """embedding [L, H], hidden [L, H] -> ([e; n] [L, 2H], residual [L, H])."""
        normed = self.hidden_norm(hidden)
        return torch.cat(
            [self.input_layernorm(embedding), normed], -1
        ), normed if self.norm_before_residual else hidden

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """residual [L, H], attended [L, N, D] -> state before the final norm [L, H]."""
        residual = residual + self.self_attn.o_proj(attended.flatten(1))
        out: Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return out


class Eagle3Draft(nn.Module):
    """All tensors of a draft. The target's embedding is a buffer: used, never trained, never saved."""

    def __init__(self, config: DraftConfig, embedding: Tensor) -> None:
        super().__init__()
        layer = config.transformer_layer_config
        hidden, eps = layer["hidden_size"], layer["rms_norm_eps"]
        num_aux = len(config.eagle_aux_hidden_state_layer_ids)
        self.config = config
        self.register_buffer("embedding", embedding, persistent=False)
        self.input_norm: nn.Module = (
            nn.RMSNorm(num_aux * config.target_hidden_size, eps=eps)
            if config.norm_before_fc
            else nn.Identity()
        )
        self.fc_norm = nn.ModuleList(
            nn.RMSNorm(config.target_hidden_size, eps=eps) for _ in range(num_aux * config.fc_norm)
        )
        self.fc = nn.Linear(num_aux * config.target_hidden_size, hidden, bias=False)
        self.layers = nn.ModuleList([DraftLayer(layer, config.norm_before_residual)])
        self.norm = nn.RMSNorm(hidden, eps=eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        self.rope = RotaryTable(layer)

    def embed(self, token_ids: Tensor) -> Tensor:
        """[L] target token ids -> [L, H]."""
        return F.embedding(token_ids, self.embedding)  # type: ignore[arg-type]

    def combine_aux(self, aux: Tensor) -> Tensor:
        """aux [L, A, H] -> fc output [L, H]; computed in the draft's dtype."""
        x = self.input_norm(aux.to(self.fc.weight.dtype).flatten(1))
        if len(self.fc_norm):
            parts = x.view(len(x), len(self.fc_norm), -1).unbind(1)
            x = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        out: Tensor = self.fc(x)
        return out

    def feedback(self, pre: Tensor) -> Tensor:
        """State handed to the next step: before the final norm, or after it with `norm_output`; [L, H]."""
        out: Tensor = self.norm(pre) if self.config.norm_output else pre
        return out


def init_draft(
    config: DraftConfig, target: TargetTensors, target_ids: Tensor, cfg: TrainConfig
) -> Eagle3Draft:
    """Build a draft ready to train.

    Matrices are normal with the target's initializer_range, norms are ones, the head starts from the target's rows of the draft
    vocabulary (cfg.head random: normal too). The last norm does not start from the target's, whose gain can be far from one:
    on SmolLM2 a run that did began at 25 nats a step, one from ones at 12 (other settings differed too).

    Args:
        target_ids: [K] int64 target ids of the draft vocabulary.
    """
    generator = torch.Generator().manual_seed(cfg.seed)
    draft = Eagle3Draft(config, target.embedding)
    std = config.transformer_layer_config.get("initializer_range", 0.02)
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, std, generator=generator)
        if cfg.head != "random":
            draft.lm_head.weight.copy_(target.head[target_ids])
    draft.lm_head.weight.requires_grad_(cfg.head != "target_frozen")
    return draft


def load_exported(export_dir: str | Path, embedding: Tensor) -> tuple[Eagle3Draft, Tensor]:
    """Read a draft in the Speculators format back for the unroll or to train on, in float32 whatever it is stored in.

    Args:
        export_dir: directory that export.py or initial.py wrote: its config.json leaves nothing to defaults.
        embedding: [V, H] the target's input embedding; one that the draft brings itself is left out.

    Returns:
        The draft, and the target ids [K] int64 of its vocabulary, ascending.
    """
    content = read_config(export_dir)
    known = {f.name for f in fields(DraftConfig)} - {"target_architectures"}
    architectures = content["speculators_config"]["verifier"]["architectures"]
    config = DraftConfig(**{k: content[k] for k in known}, target_architectures=architectures)
    tensors = {plain_name(name): t for name, t in load_file(Path(export_dir) / "model.safetensors").items()}
    own = tensors.pop("embed_tokens.weight", None)
    if own is not None and not torch.equal(own.float(), embedding.cpu().to(own.dtype).float()):
        logger.warning(
            "%s has an embedding of its own that differs from the target's; the target's is used", export_dir
        )
    draft = Eagle3Draft(config, embedding)
    draft.load_state_dict({name: t for name, t in tensors.items() if name not in ("d2t", "t2d")}, strict=True)
    return draft, read_target_ids(export_dir, config.draft_vocab_size)
