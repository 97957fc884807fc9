"""What the engine proposes after every step, token for token, against the reference drafter."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from eagle3.config.engine import EngineConfig
from eagle3.draft.decode import ReferenceDraft
from eagle3.engine.engine import generate, run
from eagle3.engine.interface import EngineSettings, Speculation
from eagle3.engine.progress import Watch
from eagle3.regenerate.answers import Sampling
from tests.helpers.engine_jobs import record_proposals
from tests.helpers.exports import write_exported
from tests.helpers.factories import draft_config, layer_config, tiny_target

pytestmark = pytest.mark.engine

VOCAB, DRAFT_VOCAB, K, LAYER_IDS = 97, 41, 4, [1, 2, 3]
ENGINE = EngineConfig(dtype="float32", max_model_len=128, max_num_seqs=8, max_num_batched_tokens=64)
SIZES = {"vocab_size": VOCAB, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}


def write_variant(directory: Path, model_type: str, norm_before_residual: bool) -> PreTrainedModel:
    target = tiny_target(model_type, VOCAB, num_attention_heads=2, num_key_value_heads=1, head_dim=32).float()
    target.save_pretrained(directory / "target")
    config = draft_config(layer_config(model_type, **SIZES), norm_before_residual=norm_before_residual)
    write_exported(directory, config, K)
    return target


@pytest.mark.parametrize("norm_before_residual", [True, False])
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_the_reference_proposes_the_engines_tokens_after_every_step(
    tmp_path: Path, model_type: str, norm_before_residual: bool
) -> None:
    target = write_variant(tmp_path, model_type, norm_before_residual)
    prompts = [
        torch.randint(VOCAB, (2 + 5 * i,), generator=torch.Generator().manual_seed(i)).tolist()
        for i in range(8)
    ]
    speculation = Speculation(str(tmp_path / "export"), K)
    settings = EngineSettings.from_dirs(tmp_path / "target", ENGINE, speculation=speculation)
    run(settings, partial(record_proposals, path=tmp_path / "proposals.jsonl"), Watch("record"))
    greedy = Sampling(temperature=0.0, top_p=1.0, max_new_tokens=24, ignore_eos=True)
    answers = generate(settings, prompts, greedy).answers
    states = {}
    for prompt, answer in zip(prompts, answers, strict=True):
        text = prompt + answer.token_ids
        with torch.no_grad():
            hidden = target(torch.tensor([text]), output_hidden_states=True).hidden_states
        states[tuple(text)] = torch.stack([hidden[k][0] for k in LAYER_IDS], dim=1)
    draft = ReferenceDraft.load(
        tmp_path / "export", target.get_input_embeddings().weight.detach(), torch.float32
    )
    proposals = [json.loads(line) for line in (tmp_path / "proposals.jsonl").read_text().splitlines()]
    assert len(proposals) > 100
    for tokens, proposed in proposals:
        aux = next(aux for text, aux in states.items() if list(text[: len(tokens)]) == tokens)
        assert draft.propose(tokens, aux[: len(tokens) - 1], len(proposed)) == proposed, len(tokens)
