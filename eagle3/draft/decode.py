"""Reference drafting: the recurrence that vLLM runs, and speculative decoding with it, in plain torch.

It shares no code with `model.py` on purpose: tests compare training with this file, and this file with the
engine. The target has sampled t[m], the last of tokens t[0..m]; aux states a[p] are known for p = 0 … m-1.
The draft guesses d[1], d[2], … for t[m+1], t[m+2], …:

    step   fed token   hidden input               RoPE position   guess
    0      t[p+1]      fc(a[p]), every p < m      p               d[1], from the last slot p = m-1
    1      d[1]        state of step 0            m               d[2]
    2      d[2]        state of step 1            m+1             d[3]

The state before the final norm is fed back, with `norm_output` the one after it. Sources:
vllm/model_executor/models/llama_eagle3.py and vllm/v1/spec_decode/llm_base_proposer.py.
"""

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding


@dataclass(frozen=True)
class DraftState:
    """Result of a step. logits: [K] of the next guess. hidden: [1, H], fed back. keys, values: [P, G, D]."""

    logits: Tensor
    hidden: Tensor
    keys: Tensor
    values: Tensor


class ReferenceDraft:
    """One draft in one dtype.

    Args:
        config: content of config.json or draft.json.
        tensors: content of model.safetensors, with `d2t` [K] if the draft vocabulary is smaller than the
            target's.
        embedding: [V, H], the target's input embedding.
        dtype: arithmetic dtype. As in the engine, norms and softmax run at least in float32, RoPE angles in
            float32.
    """

    def __init__(
        self, config: dict[str, Any], tensors: dict[str, Tensor], embedding: Tensor, dtype: torch.dtype
    ) -> None:
        layer = dict(config["transformer_layer_config"])
        self.config = AutoConfig.for_model(layer.pop("model_type"), **layer)
        self.norm_before_residual: bool = config["norm_before_residual"]
        self.norm_before_fc: bool = config["norm_before_fc"]
        self.fc_norm: bool = config["fc_norm"]
        self.norm_output: bool = config["norm_output"]
        self.layer_ids: list[int] = config["eagle_aux_hidden_state_layer_ids"]
        size = self.config.hidden_size // self.config.num_attention_heads
        self.head_dim: int = getattr(self.config, "head_dim", None) or size
        self.eps: float = self.config.rms_norm_eps
        self.weights = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
        draft_ids = torch.arange(config["draft_vocab_size"])
        self.target_ids = draft_ids + tensors["d2t"] if len(draft_ids) < self.config.vocab_size else draft_ids
        self.embedding = embedding.to(dtype)
        self.dtype = dtype
        self.wide = torch.promote_types(dtype, torch.float32)
        self.rope = LlamaRotaryEmbedding(self.config)

    @classmethod
    def load(
        cls, export_dir: str | Path, embedding: Tensor, dtype: torch.dtype = torch.float32
    ) -> "ReferenceDraft":
        """Read an exported directory."""
        path = Path(export_dir)
        config = json.loads((path / "config.json").read_text())
        return cls(config, load_file(path / "model.safetensors"), embedding, dtype)

    @torch.no_grad()
    def prefill(self, token_ids: list[int], aux: Tensor) -> DraftState:
        """Step 0 over every slot.

        Args:
            token_ids: t[0..m], m at least 1.
            aux: [m, A, H] aux states of positions 0 … m-1, ascending layer order.
        """
        m = len(token_ids) - 1
        if m < 1 or aux.shape[:2] != (m, len(self.layer_ids)):
            raise ValueError(
                f"{len(token_ids)} tokens need aux states [{m}, {len(self.layer_ids)}, H] and at least two "
                f"tokens, got {list(aux.shape)}; give the states of all positions but the last"
            )
        hidden = self._combine(aux.to(self.dtype))
        return self._layer(torch.tensor(token_ids[1:]), hidden, torch.arange(m), None)

    @torch.no_grad()
    def step(self, state: DraftState, token_id: int) -> DraftState:
        """The next step, fed the target id `token_id`; its RoPE position is the number of keys."""
        return self._layer(torch.tensor([token_id]), state.hidden, torch.tensor([len(state.keys)]), state)

    def propose_logits(self, token_ids: list[int], aux: Tensor, fed: list[int] | None, k: int) -> Tensor:
        """Draft logits of k steps.

        Args:
            token_ids, aux: see `prefill`.
            fed: target ids fed at steps 1 … k-1 (teacher forcing: t[m+1], t[m+2], …), or None to feed the
                draft's own guesses.

        Returns:
            [k, K].
        """
        state = self.prefill(token_ids, aux)
        logits = [state.logits]
        for i in range(k - 1):
            state = self.step(state, fed[i] if fed is not None else self.target_id(state.logits))
            logits.append(state.logits)
        return torch.stack(logits)

    def propose(self, token_ids: list[int], aux: Tensor, k: int) -> list[int]:
        """The k greedy guesses for t[m+1] … t[m+k], as target ids; arguments as in `prefill`."""
        return [self.target_id(row) for row in self.propose_logits(token_ids, aux, None, k)]

    def target_id(self, logits: Tensor) -> int:
        """Target id of the best draft token; logits [K]."""
        return int(self.target_ids[int(logits.argmax())])

    def _combine(self, aux: Tensor) -> Tensor:
        flat = aux.flatten(1)
        if self.norm_before_fc:
            flat = self._norm(flat, "input_norm")
        if self.fc_norm:
            parts = flat.chunk(len(self.layer_ids), dim=-1)
            flat = torch.cat([self._norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)], dim=-1)
        return self._linear(flat, "fc")

    def _layer(
        self, token_ids: Tensor, hidden: Tensor, positions: Tensor, past: DraftState | None
    ) -> DraftState:
        embed = self._norm(self.embedding[token_ids], "layers.0.input_layernorm")
        normed = self._norm(hidden, "layers.0.hidden_norm")
        residual = normed if self.norm_before_residual else hidden
        attended, keys, values = self._attention(torch.cat([embed, normed], dim=-1), positions, past)
        residual = residual + attended
        inner = self._norm(residual, "layers.0.post_attention_layernorm")
        gate, up = (self._linear(inner, f"layers.0.mlp.{name}_proj") for name in ("gate", "up"))
        before_norm = (residual + self._linear(F.silu(gate) * up, "layers.0.mlp.down_proj"))[-1:]
        last = self._norm(before_norm, "norm")
        fed_back = last if self.norm_output else before_norm
        return DraftState(self._linear(last, "lm_head")[0], fed_back, keys, values)

    def _attention(
        self, x: Tensor, positions: Tensor, past: DraftState | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x [L, 2H] -> output [L, H], all keys and all values so far, [P, G, D] each."""
        projected = (self._linear(x, f"layers.0.self_attn.{n}_proj") for n in "qkv")
        queries, keys, values = (y.view(len(x), -1, self.head_dim) for y in projected)
        if self.config.model_type == "qwen3":
            queries = self._norm(queries, "layers.0.self_attn.q_norm")
            keys = self._norm(keys, "layers.0.self_attn.k_norm")
        queries, keys = self._rotate(queries, positions), self._rotate(keys, positions)
        num_past = 0
        if past is not None:
            num_past = len(past.keys)
            keys, values = torch.cat([past.keys, keys]), torch.cat([past.values, values])
        group = queries.shape[1] // keys.shape[1]
        products = torch.einsum("qnd,knd->nqk", queries, keys.repeat_interleave(group, 1))
        scores = products.to(self.wide) * self.head_dim**-0.5
        hidden_keys = torch.ones(len(x), len(keys), dtype=torch.bool).triu(num_past + 1)
        shares = scores.masked_fill(hidden_keys, -torch.inf).softmax(-1).to(self.dtype)
        out = torch.einsum("nqk,knd->qnd", shares, values.repeat_interleave(group, 1))
        return self._linear(out.flatten(1), "layers.0.self_attn.o_proj"), keys, values

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        tables: tuple[Tensor, Tensor] = self.rope(torch.empty(0), positions[None])
        cos, sin = (table[0, :, None].to(self.dtype) for table in tables)
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-second, first], dim=-1) * sin

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        v = x.to(self.wide)
        scaled = v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + self.eps)
        return scaled.to(self.dtype) * self.weights[f"{name}.weight"]


@torch.no_grad()
def speculative_generate(
    target: PreTrainedModel,
    draft: ReferenceDraft,
    prompt_ids: list[int],
    max_new_tokens: int,
    k: int,
    eos_ids: Collection[int],
) -> tuple[list[int], int, list[int]]:
    """Greedy speculative decoding: the tokens of plain greedy decoding, and the counts that vLLM reports.

    The prefill yields the first token. Every later pass is one round: the target reads its newest token and k
    guesses, keeps the leading guesses that equal its own argmax, and adds one token of its own. Accepted
    guesses are counted before the answer is cut at its end (vLLM's v1/core/sched/scheduler.py). Returns the
    answer with its end token, rounds, and accepted guesses by position.
    """
    _check_layer_ids(draft.layer_ids, target.config.num_hidden_layers)
    accepted = [0] * k
    rounds = 0
    output = target(torch.tensor([prompt_ids]), use_cache=True, output_hidden_states=True)
    cache = output.past_key_values
    aux = _aux_states(output, draft.layer_ids)
    answer = [int(output.logits[0, -1].argmax())]
    while len(answer) < max_new_tokens and not set(answer) & set(eos_ids):
        guesses = draft.propose([*prompt_ids, *answer], aux, k)
        fed = torch.tensor([[answer[-1], *guesses]])
        output = target(fed, past_key_values=cache, use_cache=True, output_hidden_states=True)
        own = output.logits[0].argmax(-1).tolist()
        kept = next((i for i, guess in enumerate(guesses) if guess != own[i]), k)
        rounds += 1
        accepted = [count + (i < kept) for i, count in enumerate(accepted)]
        aux = torch.cat([aux, _aux_states(output, draft.layer_ids)[: kept + 1]])
        cache.crop(len(aux) - cache.get_seq_length())
        answer.extend(own[: kept + 1])
    end = next((i + 1 for i, token in enumerate(answer) if token in eos_ids), len(answer))
    return answer[: min(end, max_new_tokens)], rounds, accepted


def _check_layer_ids(layer_ids: list[int], num_layers: int) -> None:
    if max(layer_ids) >= num_layers:
        raise ValueError(
            f"aux layer ids must be below the target's {num_layers} layers here, got {layer_ids}; "
            "use the vLLM engine"
        )


def _aux_states(output: Any, layer_ids: list[int]) -> Tensor:
    """[n, A, H]: the residual stream after each aux layer; hidden_states[j] is the one after j layers."""
    return torch.stack([output.hidden_states[j][0] for j in sorted(layer_ids)], dim=1)
