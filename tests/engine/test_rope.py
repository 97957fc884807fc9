"""The angles of the draft's rotary table are those that vLLM builds from the exported layer."""

from typing import Any

import pytest
import torch

from eagle3.draft.config import layer_config
from eagle3.draft.model import RotaryTable

pytestmark = pytest.mark.engine
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "rope_theta": 500000.0,
}


def target(model_type: str, **changes: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    return {"model_type": model_type} | sizes | {"max_position_embeddings": 1024, "vocab_size": 99} | changes


@pytest.mark.parametrize(
    "config",
    [
        target(
            "gpt_oss",
            hidden_size=2880,
            num_attention_heads=64,
            num_key_value_heads=8,
            max_position_embeddings=131072,
        ),
        target(
            "qwen3_moe", head_dim=128, rope_theta=1000000.0, num_experts_per_tok=2, moe_intermediate_size=64
        ),
        target("mistral", rope_theta=1000000.0),
        target("qwen2", rope_theta=1000000.0),
        target("llama", rope_parameters=LLAMA3 | {"original_max_position_embeddings": 256}),
    ],
    ids=lambda config: config["model_type"],
)
def test_the_drafts_angles_are_the_engines(config: dict[str, Any]) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    layer = layer_config(config)
    head_dim = layer.get("head_dim") or layer["hidden_size"] // layer["num_attention_heads"]
    with set_current_vllm_config(VllmConfig()):
        engine = get_rope(
            head_dim,
            layer["max_position_embeddings"],
            rope_parameters=layer["rope_parameters"],
            dtype=torch.float32,
        )
    positions = torch.tensor([0, 1, 5, 300, 1023])
    cos, sin = engine.cos_sin_cache[positions].chunk(2, -1)
    table = RotaryTable(layer)
    angles = positions.float()[:, None] * table.get_buffer("inv_freq")
    torch.testing.assert_close(angles.cos() * table.scaling, cos.float(), rtol=0, atol=2e-4)
    torch.testing.assert_close(angles.sin() * table.scaling, sin.float(), rtol=0, atol=2e-4)
