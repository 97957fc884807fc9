"""Tiny random drafts, targets and rows of odd sizes, in float64."""

import torch
from torch import Tensor

from eagle3.config.training import TrainConfig
from eagle3.draft.config import DraftConfig
from eagle3.draft.model import Eagle3Draft, init_draft
from eagle3.shards.hidden_states import HiddenStateRow, last_state_positions
from eagle3.targets.weights import TargetTensors

VOCAB, DRAFT_VOCAB, HIDDEN = 97, 41, 48
LAYER_IDS = [1, 3, 4]


def target_config(model_type: str = "llama") -> dict:
    return {
        "model_type": model_type,
        "architectures": ["LlamaForCausalLM" if model_type == "llama" else "Qwen3ForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": 80,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }


def tiny_target(model_type: str = "llama", dtype: torch.dtype = torch.float64) -> TargetTensors:
    g = torch.Generator().manual_seed(1)
    embedding = torch.randn(VOCAB, HIDDEN, generator=g, dtype=torch.float64).to(dtype)
    norm = (1 + 0.1 * torch.randn(HIDDEN, generator=g, dtype=torch.float64)).to(dtype)
    return TargetTensors(target_config(model_type), embedding, norm, 1e-5, embedding)


def draft_target_ids() -> Tensor:
    return torch.randperm(VOCAB, generator=torch.Generator().manual_seed(2))[:DRAFT_VOCAB].sort().values


def tiny_draft(model_type: str = "llama", **settings: object) -> Eagle3Draft:
    """A float64 draft whose every parameter, norms included, is random."""
    cfg = TrainConfig(**settings)
    config = DraftConfig.from_target(target_config(model_type), LAYER_IDS, DRAFT_VOCAB, cfg)
    draft = init_draft(config, tiny_target(model_type), draft_target_ids(), cfg).double()
    g = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in draft.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=g, dtype=torch.float64))
    return draft


def random_row(name: str, mask: list[int], dtype: torch.dtype = torch.float64) -> HiddenStateRow:
    """A row whose tokens and states depend on its name only."""
    g = torch.Generator().manual_seed(sum(name.encode()))
    loss_mask = torch.tensor(mask, dtype=torch.bool)
    positions = last_state_positions(loss_mask)
    return HiddenStateRow(
        name,
        torch.randint(VOCAB, (len(mask),), generator=g),
        loss_mask,
        torch.randn(len(mask), len(LAYER_IDS), HIDDEN, generator=g, dtype=torch.float64).to(dtype),
        torch.randn(len(positions), HIDDEN, generator=g, dtype=torch.float64).to(dtype),
        positions,
    )


ROWS = {
    "answer": [0, 0, 0, 1, 1, 1, 1, 1],
    "two turns": [0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0],
    "one token": [0],
    "all supervised": [1, 1, 1, 1, 1],
    "nothing supervised": [0, 0, 0, 0],
    "short answer": [0, 0, 1, 1],
}


def all_rows() -> list[HiddenStateRow]:
    return [random_row(name, mask) for name, mask in ROWS.items()]
