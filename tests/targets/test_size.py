"""Sizes from config.json: compared with built models and published sizes; targets too large are refused."""

from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from eagle3.targets.size import check_gpu_memory, check_tensor_parallel, target_size
from eagle3.targets.weights import SUPPORTED_MODEL_TYPES
from tests.helpers.configs import GPT_OSS_20B, LLAMA31_8B, QWEN3_8B, QWEN3_30B_A3B
from tests.targets.test_architectures import sizes


@pytest.mark.parametrize("model_type", SUPPORTED_MODEL_TYPES)
def test_parameters_are_those_of_the_built_models_matrices(model_type: str) -> None:
    config = AutoConfig.for_model(model_type, **sizes(model_type))
    model = AutoModelForCausalLM.from_config(config)
    built = sum(
        p.numel() for name, p in model.named_parameters() if p.dim() > 1 and not name.endswith("bias")
    )
    assert target_size(config.to_dict()).params == built


def test_layers_without_experts_are_dense() -> None:
    config = AutoConfig.for_model(
        "qwen3_moe", **sizes("qwen3_moe"), mlp_only_layers=[0], decoder_sparse_step=1
    )
    built = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters() if p.dim() > 1)
    assert target_size(config.to_dict()).params == built


@pytest.mark.parametrize(
    ("config", "params", "active"),
    [
        (LLAMA31_8B, 8.03, 7.50),
        (QWEN3_8B, 8.19, 7.57),
        (QWEN3_30B_A3B, 30.53, 3.04),
        (GPT_OSS_20B, 20.91, 3.61),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_published_sizes_come_out(config: dict[str, Any], params: float, active: float) -> None:
    size = target_size(config)
    assert (round(size.params / 1e9, 2), round(size.active_params / 1e9, 2)) == (params, active)


def test_quantised_weights_are_counted_as_stored() -> None:
    assert target_size(GPT_OSS_20B).weight_bytes("bfloat16") == pytest.approx(
        13.76e9, rel=0.01
    )  # its checkpoint's files
    plain = {k: v for k, v in GPT_OSS_20B.items() if k != "quantization_config"}
    assert target_size(plain).weight_bytes("bfloat16") == 2 * target_size(plain).params
    fp8 = target_size(QWEN3_8B | {"quantization_config": {"quant_method": "fp8"}})
    assert fp8.weight_bytes("bfloat16") == fp8.params + fp8.embedding_params


@pytest.mark.parametrize(
    ("num_gpus", "fits"), [(1, True), (2, True), (4, True), (8, True), (3, False), (64, False)]
)
def test_heads_are_split_evenly_or_not_at_all(num_gpus: int, fits: bool) -> None:
    size = target_size(QWEN3_30B_A3B)  # 32 and 4 heads
    if fits:
        check_tensor_parallel(size, num_gpus)
        return
    with pytest.raises(
        ValueError,
        match=rf"32 attention and 4 key-value heads .* got {num_gpus}; take a power of two up to 32",
    ):
        check_tensor_parallel(size, num_gpus)


def test_weights_and_one_sequence_must_fit() -> None:
    size = target_size(LLAMA31_8B)
    needed = size.weight_bytes("bfloat16") + size.key_value_bytes("bfloat16") * 4096
    check_gpu_memory(size, "bfloat16", 4096, 1, needed, "")
    with pytest.raises(
        ValueError, match=r"4096 tokens must fit into 1 x 17 GB .* they take 16 \+ 0\.5 GB; raise it"
    ):
        check_gpu_memory(size, "bfloat16", 4096, 1, needed - 1, "raise it")
    check_gpu_memory(size, "bfloat16", 4096, 2, needed / 2, "")


def test_reading_costs_two_operations_a_parameter_and_attention_grows_with_the_square() -> None:
    size = target_size(LLAMA31_8B)
    short, long = size.prefill_flops(1, 1), size.prefill_flops(1, 10_000)
    assert short == 2 * size.active_params + 2 * 32 * 32 * 128
    assert long - 2 * size.active_params * 10_000 == 2 * 32 * 32 * 128 * 10_000**2
    assert size.prefill_flops(10, 10_000) < long
