"""What is refused of a target before anything is built for it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from eagle3.targets.weights import check_target_dir, load_target_tensors

CONFIG = {"model_type": "llama", "vocab_size": 5, "hidden_size": 4, "rms_norm_eps": 1e-5}


def write_target(path: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    (path / "config.json").write_text(json.dumps(CONFIG | config))
    save_file(tensors, path / "model.safetensors")
    return path


def tensors() -> dict[str, torch.Tensor]:
    return {
        "model.embed_tokens.weight": torch.arange(20.0).view(5, 4),
        "model.norm.weight": torch.ones(4),
        "lm_head.weight": -torch.arange(20.0).view(5, 4),
    }


def test_a_tied_head_is_the_embedding_and_an_untied_one_is_not(tmp_path: Path) -> None:
    untied = load_target_tensors(write_target(tmp_path, tensors()))
    assert torch.equal(untied.head, -untied.embedding)
    tied = load_target_tensors(write_target(tmp_path, tensors(), tie_word_embeddings=True))
    assert torch.equal(tied.head, tied.embedding)


def test_a_missing_head_of_an_untied_target_is_named(tmp_path: Path) -> None:
    content = tensors()
    del content["lm_head.weight"]
    with pytest.raises(ValueError, match=r"has no tensor 'lm_head\.weight'"):
        load_target_tensors(write_target(tmp_path, content))


def test_a_misshapen_tensor_is_named(tmp_path: Path) -> None:
    content = tensors() | {"lm_head.weight": torch.ones(5, 3)}
    with pytest.raises(ValueError, match=r"lm_head\.weight has shape \(5, 3\), config.json has \(5, 4\)"):
        load_target_tensors(write_target(tmp_path, content))


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_that_depends_on_the_length_is_refused(tmp_path: Path, key: str, kind: str) -> None:
    write_target(tmp_path, tensors(), **{key: {"rope_type": kind, "factor": 2.0}})
    with pytest.raises(ValueError, match=f"uses '{kind}' RoPE"):
        check_target_dir(tmp_path)


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="is a 'gemma3' model; drafts can be trained for llama, mistral, qwen2"
    ):
        check_target_dir(write_target(tmp_path, tensors(), model_type="gemma3"))
