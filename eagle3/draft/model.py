"""The draft: fc over the target's aux states, one Llama or Qwen3 decoder layer, norm, head.

The exported checkpoint has the same parameter names. The layer follows vLLM's `llama_eagle3.py` and
`qwen3_eagle3.py`:

    g = fc(aux)                       at step 0; later the state that the step before fed back
    e = RMS_in(embed);  n = RMS_hidden(g);  r = n if norm_before_residual else g
    r = r + Attention([e; n]);  pre = r + MLP(RMS_post(r));  logits = lm_head(RMS_norm(pre))
    fed back: pre, or its norm
"""

import logging
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from eagle3.config.training import TrainConfig
from eagle3.draft.attention import UnrollCache, VisibleKeys, unroll_attention
from eagle3.draft.batch import PackedBatch
from eagle3.draft.config import DraftConfig
from eagle3.draft.speculators import plain_name, read_config, read_target_ids
from eagle3.targets.weights import TargetTensors

logger = logging.getLogger(__name__)


class RotaryTable(nn.Module):
    """RoPE of a Hugging Face config, angles in float32; scaling must not depend on the length."""

    def __init__(self, layer: dict[str, Any]) -> None:
        super().__init__()
        from transformers import AutoConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        table = LlamaRotaryEmbedding(AutoConfig.for_model(**layer))
        self.register_buffer("inv_freq", table.inv_freq.float(), persistent=False)
        self.scaling = float(table.attention_scaling)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate x [L, heads, D] at integer positions [L]; pairs are Llama's (i, i + D/2)."""
        angles = positions.float()[:, None] * self.get_buffer("inv_freq").float()
        angles = torch.cat([angles, angles], -1)[:, None]
        cos, sin = (angles.cos() * self.scaling).to(x.dtype), (angles.sin() * self.scaling).to(x.dtype)
        left, right = x.chunk(2, -1)
        return x * cos + torch.cat([-right, left], -1) * sin


class DraftAttention(nn.Module):
    """Grouped-query attention over [embedding; hidden]."""

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

    def forward(
        self, x: Tensor, positions: Tensor, rope: RotaryTable, cache: UnrollCache, queries: Tensor | None
    ) -> Tensor:
        """x [L, 2H] -> [S, H]; other arguments as in DraftLayer."""
        keys = rope(self.k_norm(self.k_proj(x).view(-1, self.num_groups, self.size)), positions)
        cache.append(keys, self.v_proj(x).view(-1, self.num_groups, self.size))
        if queries is not None:
            x, positions = x[queries], positions[queries]
        q = rope(self.q_norm(self.q_proj(x).view(-1, self.num_heads, self.size)), positions)
        attended = unroll_attention(q, cache.k0, cache.v0, cache.own_k, cache.own_v, cache.visible)
        out: Tensor = self.o_proj(attended.flatten(1))
        return out


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

    def forward(
        self,
        embedding: Tensor,
        hidden: Tensor,
        positions: Tensor,
        rope: RotaryTable,
        cache: UnrollCache,
        queries: Tensor | None = None,
    ) -> Tensor:
        """One step of the unroll.

        Args:
            embedding: [L, H] of the tokens fed; L is T at step 0, S later.
            hidden: [L, H] fc's output at step 0, the state fed back later.
            positions: [L] int64, RoPE positions.
            cache: the layer appends the keys and values of these L positions.
            queries: [S] int64 indices of the positions that attend; None for all.

        Returns:
            [S, H] states before the final norm.
        """
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        x = torch.cat([self.input_layernorm(embedding), normed], -1)
        if queries is not None:
            residual = residual[queries]
        residual = residual + self.self_attn(x, positions, rope, cache, queries)
        out: Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return out


class Eagle3Draft(nn.Module):
    """A draft and its unroll. The target's embedding is a buffer: neither trained nor saved."""

    def __init__(self, config: DraftConfig, embedding: Tensor) -> None:
        super().__init__()
        layer = config.transformer_layer_config
        hidden, eps = layer["hidden_size"], layer["rms_norm_eps"]
        width, num_aux = config.target_hidden_size, len(config.eagle_aux_hidden_state_layer_ids)
        fc_in = num_aux * width
        self.config = config
        self.register_buffer("embedding", embedding, persistent=False)
        self.input_norm: nn.Module = nn.RMSNorm(fc_in, eps=eps) if config.norm_before_fc else nn.Identity()
        self.fc_norm = nn.ModuleList(nn.RMSNorm(width, eps=eps) for _ in range(num_aux * config.fc_norm))
        self.fc = nn.Linear(fc_in, hidden, bias=False)
        self.layers = nn.ModuleList([DraftLayer(layer, config.norm_before_residual)])
        self.norm = nn.RMSNorm(hidden, eps=eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        self.rope = RotaryTable(layer)

    def forward(self, batch: PackedBatch, visible: VisibleKeys | None = None) -> Tensor:
        """The unroll (training-time test): I steps as serving runs them, on supervised slots only.

        Step 0 computes a key and a value of every position, and a query of supervised slots. Step i feeds
        slot p the token t[p + 1 + i] and its own state of step i - 1, at RoPE position p + i, and adds a key
        and a value that only slot p sees.

        Args:
            visible: VisibleKeys of the batch; None computes them.

        Returns:
            [I, S, H] normed states: lm_head of entry [i, s] gives the logits for batch.labels()[i, s].
            Entries that are not batch.valid are finite and meaningless.
        """
        layer = self.layers[0]
        slots = batch.slots
        cache = UnrollCache(visible or VisibleKeys.from_batch(batch, slots.device))
        # A row's last position gets the next row's first token; no slot of the row sees its key.
        next_ids = batch.token_ids.roll(-1)
        hidden = self.combine_aux(batch.aux)
        pre = layer(self.embed(next_ids), hidden, batch.positions, self.rope, cache, queries=slots)
        states = [self.norm(pre)]
        for step in range(1, len(batch.valid)):
            fed_back = self.norm(pre) if self.config.norm_output else pre
            positions = batch.positions[slots] + step
            pre = layer(self.embed(batch.fed_ids(step)), fed_back, positions, self.rope, cache)
            states.append(self.norm(pre))
        return torch.stack(states)

    def embed(self, token_ids: Tensor) -> Tensor:
        """[L] target token ids -> [L, H]."""
        return F.embedding(token_ids, self.embedding)  # type: ignore[arg-type]

    def combine_aux(self, aux: Tensor) -> Tensor:
        """aux [L, A, H] -> fc output [L, H] in the draft's dtype."""
        x = self.input_norm(aux.to(self.fc.weight.dtype).flatten(1))
        if len(self.fc_norm):
            parts = x.view(len(x), len(self.fc_norm), -1).unbind(1)
            x = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        out: Tensor = self.fc(x)
        return out


def init_draft(
    config: DraftConfig, target: TargetTensors, target_ids: Tensor, cfg: TrainConfig
) -> Eagle3Draft:
    """Initialize a draft whose draft vocabulary has the target ids [K] int64.

    Matrices are normal with the target's initializer_range, norms are ones, and the head copies the target's
    rows unless cfg.head is random. The final norm does not copy the target's, whose gain can be far from one:
    on SmolLM2 the loss then began at 25 nats a step, from ones at 12 (other settings differed too).
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
    """Read a draft that export.py or initial.py wrote, in float32, on the target's embedding [V, H].

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
        message = "%s has its own embedding, which differs from the target's; the target's is used"
        logger.warning(message, export_dir)
    draft = Eagle3Draft(config, embedding)
    draft.load_state_dict({name: t for name, t in tensors.items() if name not in ("d2t", "t2d")}, strict=True)
    return draft, read_target_ids(export_dir, config.draft_vocab_size)
