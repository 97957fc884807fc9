"""Supported architectures: the three tensors give the model's own logits, and vLLM builds a draft for it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from eagle3.config.training import ExportConfig, TrainConfig
from eagle3.draft.config import DraftConfig, layer_config
from eagle3.draft.decode import ReferenceDraft
from eagle3.draft.model import RotaryTable, init_draft
from eagle3.draft.speculators import LAYER_TYPES, expected_shapes
from eagle3.export import export_config
from eagle3.targets.properties import check_max_model_len
from eagle3.targets.weights import SUPPORTED_MODEL_TYPES, check_target_config, load_target_tensors

VOCAB = 57
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 3}
CHANGES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"head_dim": 16, "sliding_window": 5},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 24},
    "qwen3_moe": EXPERTS | {"head_dim": 24, "moe_intermediate_size": 20},
    "gpt_oss": EXPERTS | {"head_dim": 16, "sliding_window": 5},
}
GPT_OSS_20B_ROPE = {
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}


def sizes(model_type: str) -> dict[str, Any]:
    plain = {
        "hidden_size": 48,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": 3,
    }
    return plain | CHANGES[model_type]


@pytest.fixture(scope="module", params=SUPPORTED_MODEL_TYPES)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A tiny random model whose gains are not one, and where it is saved."""
    torch.manual_seed(0)
    model = (
        AutoModelForCausalLM.from_config(AutoConfig.for_model(request.param, **sizes(request.param)))
        .float()
        .eval()
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.add_(0.5 * torch.randn_like(parameter))
    path = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(path)
    return model, path


@torch.no_grad()
def test_norm_and_head_on_the_last_hidden_state_are_the_models_logits(target: tuple[Any, Path]) -> None:
    model, path = target
    kept: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda module, args: kept.append(args[0]))
    ids = torch.randint(VOCAB, (1, 11), generator=torch.Generator().manual_seed(1))
    output = model(ids, output_hidden_states=True)
    tensors = load_target_tensors(path)
    normed = torch.nn.functional.rms_norm(kept[0], kept[0].shape[-1:], tensors.norm_weight, tensors.norm_eps)
    # Both sides compute the same float32 products; the models round the norm's steps in another order.
    torch.testing.assert_close(normed @ tensors.head.T, output.logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        tensors.embedding[ids], output.hidden_states[0], rtol=0, atol=0
    )  # no scaling of the embedding


@torch.no_grad()
def test_the_draft_of_every_architecture_is_a_layer_that_vllm_builds_and_the_decoder_reads(
    target: tuple[Any, Path],
) -> None:
    model, path = target
    tensors = load_target_tensors(path)
    config = DraftConfig.from_target(tensors.config, [1, 2], 31, TrainConfig())
    layer = config.transformer_layer_config
    assert layer["model_type"] == (
        tensors.config["model_type"] if tensors.config["model_type"] in LAYER_TYPES else "llama"
    )
    draft = init_draft(config, tensors, torch.arange(31), TrainConfig())
    content = export_config(config.to_dict(), "org/target", ExportConfig(dtype="float32"))
    shapes = expected_shapes(content)
    stored = {name: tuple(t.shape) for name, t in draft.state_dict().items()}
    assert stored == {name: shape for name, shape in shapes.items() if name not in ("d2t", "t2d")}
    decoder = ReferenceDraft(
        content,
        {**draft.state_dict(), "d2t": torch.zeros(31, dtype=torch.int64)},
        tensors.embedding,
        torch.float32,
    )
    assert torch.equal(decoder.rope.inv_freq, draft.rope.get_buffer("inv_freq"))
    targets = model.model.rotary_emb
    assert torch.equal(targets.inv_freq.float(), draft.rope.get_buffer("inv_freq"))
    assert draft.rope.scaling == pytest.approx(targets.attention_scaling)


def test_a_mixture_of_experts_gets_an_mlp_as_wide_as_the_experts_of_one_token() -> None:
    assert layer_config({"model_type": "qwen3_moe"} | sizes("qwen3_moe"))["intermediate_size"] == 40
    assert layer_config({"model_type": "gpt_oss"} | sizes("gpt_oss"))["intermediate_size"] == 80
    assert layer_config({"model_type": "mistral"} | sizes("mistral"))["intermediate_size"] == 40


@pytest.mark.parametrize("model_type", [m for m in SUPPORTED_MODEL_TYPES if m not in LAYER_TYPES])
def test_nothing_of_the_targets_own_kind_reaches_a_llama_draft(model_type: str) -> None:
    layer = layer_config(
        {"model_type": model_type} | sizes(model_type) | {"quantization_config": {"quant_method": "mxfp4"}}
    )
    known = AutoConfig.for_model("llama").to_dict().keys()
    assert layer.keys() == known
    assert (layer["attention_bias"], layer["mlp_bias"], layer["hidden_act"]) == (False, False, "silu")


@pytest.mark.parametrize("written", [{}, GPT_OSS_20B_ROPE])
def test_gpt_oss_rope_comes_through_whether_its_config_writes_it_or_not(written: dict[str, Any]) -> None:
    layer = layer_config({"model_type": "gpt_oss"} | sizes("gpt_oss") | written)
    rope = GPT_OSS_20B_ROPE["rope_scaling"] | {"rope_theta": 150000}
    assert layer["rope_parameters"] == rope
    assert RotaryTable(layer).scaling == pytest.approx(1 + 0.1 * 3.4657359)  # 1 + 0.1 ln 32


def test_stretched_positions_are_counted_once() -> None:
    config = {"max_position_embeddings": 131072, **GPT_OSS_20B_ROPE}
    check_max_model_len(131072, config)
    with pytest.raises(ValueError, match="must not exceed the target's 131072 positions, got 131073"):
        check_max_model_len(131073, config)


def test_a_quantised_target_is_read_without_its_quantised_tensors(tmp_path: Path) -> None:
    """gpt-oss stores its experts as mxfp4 blocks; here the file that should hold them is not even there."""
    config = (
        {"model_type": "gpt_oss", "rms_norm_eps": 1e-5}
        | sizes("gpt_oss")
        | {"hidden_size": 4, "vocab_size": 3}
    )
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}})
    )
    floats = {
        "model.embed_tokens.weight": torch.arange(12.0).view(3, 4).bfloat16(),
        "model.norm.weight": torch.ones(4).bfloat16(),
        "lm_head.weight": -torch.arange(12.0).view(3, 4).bfloat16(),
    }
    save_file(floats, tmp_path / "model-00001-of-00002.safetensors")
    where = dict.fromkeys(floats, "model-00001-of-00002.safetensors")
    where["model.layers.0.mlp.experts.gate_up_proj_blocks"] = "model-00002-of-00002.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    read = load_target_tensors(tmp_path)
    assert torch.equal(read.head, floats["lm_head.weight"].float())
    assert load_file(tmp_path / "model-00001-of-00002.safetensors").keys() == floats.keys()


def test_a_quantised_head_is_refused(tmp_path: Path) -> None:
    config = (
        {"model_type": "gpt_oss", "rms_norm_eps": 1e-5}
        | sizes("gpt_oss")
        | {"hidden_size": 4, "vocab_size": 3}
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {"model.embed_tokens.weight": torch.ones(3, 4), "model.norm.weight": torch.ones(4)}
    save_file(
        tensors | {"lm_head.weight": torch.ones(3, 4, dtype=torch.uint8)}, tmp_path / "model.safetensors"
    )
    with pytest.raises(
        ValueError, match=r"lm_head.weight is stored as torch.uint8; .* must not be quantised"
    ):
        load_target_tensors(tmp_path)


@pytest.mark.parametrize(
    "model_type", ["gemma", "gemma2", "gemma3_text", "cohere", "granite", "mixtral", "qwen3_next", None]
)
def test_an_architecture_that_is_not_plain_is_refused(model_type: str | None) -> None:
    with pytest.raises(
        ValueError, match=f"org/x is a {model_type!r} model; drafts can be trained for .*gpt_oss targets"
    ):
        check_target_config({"model_type": model_type}, "org/x")
