"""The reference draft against transformers' own attention, and speculative decoding against plain greedy
decoding.
"""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from eagle3.draft.decode import ReferenceDraft, speculative_generate
from tests.helpers.factories import (
    DRAFT_VOCAB,
    LLAMA3_ROPE,
    VOCAB,
    WIDTH,
    draft_config,
    draft_mapping,
    draft_tensors,
    embedding,
    layer_config,
    tiny_target,
)

GROUPED = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16}


def make_draft(config: dict[str, Any], seed: int = 0) -> ReferenceDraft:
    return ReferenceDraft(config, draft_tensors(config, seed) | draft_mapping(), embedding(), torch.float64)


def rms(x: Tensor, gain: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * gain


def slow_rollout(
    config: dict[str, Any], w: dict[str, Tensor], token_ids: list[int], aux: Tensor, fed: list[int], k: int
) -> Tensor:
    """[k, K] logits with transformers' attention, everything recomputed at every step, no cache."""
    cfg = AutoConfig.for_model(**config["transformer_layer_config"])
    cfg._attn_implementation = "sdpa"  # the eager one takes its softmax in float32
    attention = (Qwen3Attention if cfg.model_type == "qwen3" else LlamaAttention)(cfg, layer_idx=0)
    for name in ("q_proj", "k_proj", "v_proj"):
        setattr(attention, name, nn.Linear(2 * WIDTH, getattr(attention, name).out_features, bias=False))
    attention = attention.double()
    prefix = "layers.0.self_attn."
    attention.load_state_dict({n[len(prefix) :]: t for n, t in w.items() if n.startswith(prefix)})
    flat = aux.flatten(1)
    if config["norm_before_fc"]:
        flat = rms(flat, w["input_norm.weight"])
    if config["fc_norm"]:
        flat = torch.cat(
            [rms(aux_i, w[f"fc_norm.{i}.weight"]) for i, aux_i in enumerate(flat.split(WIDTH, 1))], 1
        )
    hidden, tokens, logits = flat @ w["fc.weight"].T, list(token_ids[1:]), []
    for i in range(k):
        n = len(tokens)
        e = rms(embedding()[tokens], w["layers.0.input_layernorm.weight"])
        h = rms(hidden, w["layers.0.hidden_norm.weight"])
        x, positions = torch.cat([e, h], -1)[None], torch.arange(n)[None]
        mask = torch.full((n, n), -torch.inf, dtype=torch.float64).triu(1)[None, None]
        out = attention(x, position_embeddings=LlamaRotaryEmbedding(cfg)(x, positions), attention_mask=mask)[
            0
        ][0]
        r = (h if config["norm_before_residual"] else hidden) + out
        y = rms(r, w["layers.0.post_attention_layernorm.weight"])
        mlp = F.silu(y @ w["layers.0.mlp.gate_proj.weight"].T) * (y @ w["layers.0.mlp.up_proj.weight"].T)
        before = (r + mlp @ w["layers.0.mlp.down_proj.weight"].T)[-1:]
        normed = rms(before, w["norm.weight"])
        logits.append((normed @ w["lm_head.weight"].T)[0])
        if i < k - 1:
            hidden = torch.cat([hidden, normed if config["norm_output"] else before])
            tokens.append(fed[i])
    return torch.stack(logits)


VARIANTS = {
    "llama": draft_config(),
    "llama grouped heads": draft_config(layer_config(**GROUPED)),
    "llama scaled rope": draft_config(layer_config(rope_parameters=LLAMA3_ROPE)),
    "norm after residual": draft_config(norm_before_residual=False),
    "qwen3": draft_config(layer_config("qwen3")),
    "qwen3 every switch": draft_config(
        layer_config("qwen3", **GROUPED),
        norm_before_residual=False,
        norm_before_fc=True,
        fc_norm=True,
        norm_output=True,
    ),
    "five aux layers": draft_config(eagle_aux_hidden_state_layer_ids=[0, 1, 2, 3, 4], fc_norm=True),
    "one aux layer": draft_config(eagle_aux_hidden_state_layer_ids=[2], norm_output=True),
}


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize("m", [1, 6])
def test_drafting_equals_a_rollout_without_cache_by_transformers_attention(
    config: dict[str, Any], m: int
) -> None:
    generator = torch.Generator().manual_seed(m)
    tokens = torch.randint(VOCAB, (m + 1,), generator=generator).tolist()
    num_aux = len(config["eagle_aux_hidden_state_layer_ids"])
    aux = torch.randn(m, num_aux, WIDTH, generator=generator, dtype=torch.float64) * 3
    fed = [5, 17, 3]
    got = make_draft(config).propose_logits(tokens, aux, fed, 4)
    want = slow_rollout(config, draft_tensors(config), tokens, aux, fed, 4)
    assert got.shape == (4, DRAFT_VOCAB)
    # transformers' RMSNorm of qwen3's q and k runs in float32 even in a float64 model
    tolerance = 1e-5 if config["transformer_layer_config"]["model_type"] == "qwen3" else 1e-12
    torch.testing.assert_close(got, want, atol=tolerance, rtol=0)


def test_guesses_are_target_ids_and_feeding_them_changes_nothing() -> None:
    draft = make_draft(draft_config())
    tokens, aux = [3, 1, 4, 1], torch.randn(3, 3, WIDTH, dtype=torch.float64)
    guesses = draft.propose(tokens, aux, 5)
    logits = draft.propose_logits(tokens, aux, guesses[:4], 5)
    assert [int(draft.target_ids[i]) for i in logits.argmax(-1)] == guesses
    allowed = set(torch.nonzero(draft_mapping()["t2d"]).flatten().tolist())
    assert set(guesses) <= allowed


def test_wrong_number_of_aux_states_is_refused() -> None:
    draft = make_draft(draft_config())
    with pytest.raises(ValueError, match=r"need aux states \[3, 3, H\]"):
        draft.propose([1, 2, 3, 4], torch.zeros(4, 3, WIDTH), 2)
    with pytest.raises(ValueError, match="at least two tokens"):
        draft.propose([1], torch.zeros(0, 3, WIDTH), 2)


def greedy(
    target: PreTrainedModel, prompt_ids: list[int], max_new_tokens: int, eos_ids: set[int]
) -> list[int]:
    tokens: list[int] = list(prompt_ids)
    with torch.no_grad():
        for _ in range(max_new_tokens):
            tokens.append(int(target(torch.tensor([tokens])).logits[0, -1].argmax()))
            if tokens[-1] in eos_ids:
                break
    return tokens[len(prompt_ids) :]


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_speculative_decoding_writes_the_same_tokens_as_greedy_decoding(model_type: str) -> None:
    target, config = tiny_target(model_type, vocab_size=7), draft_config(draft_vocab_size=5)
    tensors = draft_tensors(config) | draft_mapping(7, 5)
    draft = ReferenceDraft(config, tensors, target.get_input_embeddings().weight.detach(), torch.float64)
    total = 0
    for seed, eos_ids in itertools.product(range(6), ({0}, {2, 6}, set())):
        prompt = torch.randint(7, (3 + seed,), generator=torch.Generator().manual_seed(seed)).tolist()
        tokens, rounds, accepted = speculative_generate(target, draft, prompt, 21, 3, eos_ids)
        assert tokens == greedy(target, prompt, 21, eos_ids)
        assert accepted == sorted(accepted, reverse=True)
        assert accepted[0] <= rounds
        assert len(tokens) <= 1 + rounds + sum(accepted) <= len(tokens) + 3
        total += sum(accepted)
    assert total > 0


def scripted(script: list[list[int]]) -> Any:
    """A draft that proposes from a list."""
    rounds = iter(script)
    return SimpleNamespace(layer_ids=[1], propose=lambda tokens, aux, k: next(rounds))


def test_rounds_and_accepted_guesses_are_counted_before_the_answer_is_cut() -> None:
    target, prompt = tiny_target(), [8, 5]
    g = greedy(target, prompt, 12, set())
    assert len(set(g[:6])) == 6
    wrong = next(t for t in range(VOCAB) if t not in g)
    # all three right, then one right of three, then none
    script = [g[1:4], [g[5], wrong, g[7]], [wrong, g[8], g[9]]]
    assert speculative_generate(target, scripted(script), prompt, 8, 3, set()) == (g[:8], 3, [2, 1, 1])
    # max_new_tokens reached inside the first round: its three guesses still count
    assert speculative_generate(target, scripted(script), prompt, 3, 3, set()) == (g[:3], 1, [1, 1, 1])
    # the end token is the second guess of the first round: the third still counts
    assert speculative_generate(target, scripted(script), prompt, 12, 3, {g[2]}) == (g[:3], 1, [1, 1, 1])
    # the first token ends the answer: no round
    assert speculative_generate(target, scripted(script), prompt, 12, 3, {g[0]}) == (g[:1], 0, [0, 0, 0])


def test_aux_layers_that_transformers_shows_only_after_the_norm_are_refused() -> None:
    draft = make_draft(draft_config(eagle_aux_hidden_state_layer_ids=[1, 2, 4]))
    with pytest.raises(ValueError, match="below the target's 4 layers"):
        speculative_generate(tiny_target(), draft, [1, 2], 4, 3, set())
