"""A random draft, exported and served by the real engine, against the reference: same tokens, rounds and accepted counts."""

from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.config.engine import EngineConfig
from eagle3.draft.decode import ReferenceDraft, speculative_generate
from eagle3.engine.engine import generate
from eagle3.engine.interface import EngineSettings, Speculation
from eagle3.regenerate.answers import Sampling
from tests.helpers.exports import write_exported
from tests.helpers.factories import LLAMA3_ROPE, draft_config, layer_config, tiny_target

pytestmark = pytest.mark.engine

VOCAB, K, END = 7, 3, 2
ENGINE = EngineConfig(
    dtype="float32", max_model_len=256, max_num_seqs=4, max_num_batched_tokens=256, enforce_eager=True
)

# target model type, draft vocabulary, changes of the draft's layer, changes of draft.json
VARIANTS: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", 5, {}, {}),
    "llama, norm after residual, scaled rope": (
        "llama",
        5,
        {"rope_parameters": LLAMA3_ROPE},
        {"norm_before_residual": False},
    ),
    "qwen3, every norm, four aux layers": (
        "qwen3",
        5,
        {},
        {
            "norm_before_fc": True,
            "fc_norm": True,
            "norm_output": True,
            "eagle_aux_hidden_state_layer_ids": [0, 1, 2, 3],
        },
    ),
    "qwen3, norm after residual, whole vocabulary": ("qwen3", VOCAB, {}, {"norm_before_residual": False}),
}


@pytest.mark.parametrize(
    ("model_type", "draft_vocab_size", "layer", "changes"), VARIANTS.values(), ids=VARIANTS.keys()
)
def test_the_engine_proposes_and_counts_what_the_reference_does(
    tmp_path: Path, model_type: str, draft_vocab_size: int, layer: dict[str, Any], changes: dict[str, Any]
) -> None:
    serve_and_compare(tmp_path, model_type, draft_vocab_size, layer, changes)


def test_a_target_split_over_two_ranks_serves_the_same(tmp_path: Path) -> None:
    layer = {"intermediate_size": 80}  # halves must be whole
    serve_and_compare(tmp_path, "llama", 5, layer, {}, 2, **layer)


def serve_and_compare(
    tmp_path: Path,
    model_type: str,
    draft_vocab_size: int,
    layer: dict[str, Any],
    changes: dict[str, Any],
    num_ranks: int = 1,
    **target_sizes: int,
) -> None:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    target = tiny_target(model_type, VOCAB, eos_token_id=END, **heads, **target_sizes).float()
    target.save_pretrained(tmp_path / "target")
    sizes = {"vocab_size": VOCAB, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    config = draft_config(
        layer_config(model_type, **sizes, **layer), draft_vocab_size=draft_vocab_size, **changes
    )
    export_dir = write_exported(tmp_path, config, K)
    prompts = [
        torch.randint(VOCAB, (3 + i % 6,), generator=torch.Generator().manual_seed(i)).tolist()
        for i in range(16)
    ]
    speculation = Speculation(str(export_dir), K)
    settings = EngineSettings.from_dirs(
        tmp_path / "target", ENGINE, speculation=speculation, tensor_parallel_size=num_ranks
    )
    served = generate(settings, prompts, Sampling(temperature=0.0, top_p=1.0, max_new_tokens=20))
    draft = ReferenceDraft.load(export_dir, target.get_input_embeddings().weight.detach(), torch.float32)
    rounds, accepted = 0, [0] * K
    for prompt, answer in zip(prompts, served.answers, strict=True):
        tokens, n, by_position = speculative_generate(target, draft, prompt, 20, K, {END})
        assert answer.token_ids == tokens
        rounds, accepted = rounds + n, [a + b for a, b in zip(accepted, by_position, strict=True)]
    assert {a.finish_reason for a in served.answers} == {"stop", "length"}
    assert (served.num_drafts, served.accepted_per_position) == (rounds, tuple(accepted))
    assert 0 < sum(accepted) < rounds * K
