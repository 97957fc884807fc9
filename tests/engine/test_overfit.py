"""A draft that has learnt its conversations by heart, served by the real engine: nearly every guess is accepted."""

from pathlib import Path

import pytest
import torch

from eagle3.config.engine import EngineConfig
from eagle3.config.training import TrainConfig
from tests.benchmarks.overfit import NUM_CONVERSATIONS, overfit
from tests.helpers.factories import tiny_target

pytestmark = pytest.mark.engine


def test_a_draft_learns_twenty_conversations_by_heart(tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "initializer_range": 0.15}
    target = tiny_target(
        "llama", 97, num_attention_heads=4, num_key_value_heads=2, head_dim=32, **sizes
    ).float()
    # The same answers from sharper probabilities: a random target's are so even that learning them takes five times the steps.
    target.lm_head.weight.data.mul_(8)
    target.save_pretrained(tmp_path / "target")
    g = torch.Generator().manual_seed(0)
    prompts = [torch.randint(97, (4 + i % 7,), generator=g).tolist() for i in range(NUM_CONVERSATIONS)]
    engine = EngineConfig(
        dtype="float32", max_model_len=256, max_num_seqs=20, max_num_batched_tokens=256, enforce_eager=True
    )
    cfg = TrainConfig(
        epochs=40,
        pack_tokens=512,
        learning_rate=5e-3,
        fc_norm=True,
        norm_output=True,
        validation_rows=0,
        checkpoint_every=100_000,
    )
    (tmp_path / "work").mkdir()
    figures = overfit(tmp_path / "target", prompts, engine, cfg, tmp_path / "work")
    assert figures["acceptance_length"] >= 3.8
    assert figures["rounds"] == figures["trainer_rounds"]
    assert figures["accepted"] == figures["trainer_accepted"]
    assert figures["outputs_identical"]
