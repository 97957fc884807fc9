"""What the engine proposes after every step, token for token, against the reference drafter."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from eagle3.config import ExportConfig
from eagle3.draft.decode import ReferenceDraft
from eagle3.export import write_export
from eagle3.target.engine import _environment
from eagle3.vocab import Vocab, save_vocab
from tests.draft.factories import draft_config, draft_mapping, draft_tensors, layer_config, tiny_target

pytestmark = pytest.mark.engine

VOCAB, DRAFT_VOCAB, K, LAYER_IDS = 97, 41, 4, [1, 2, 3]
SIZES = {"vocab_size": VOCAB, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}


def write_variant(directory: Path, model_type: str, norm_before_residual: bool) -> PreTrainedModel:
    target = tiny_target(model_type, VOCAB, num_attention_heads=2, num_key_value_heads=1, head_dim=32).float()
    target.save_pretrained(directory / "target")
    config = draft_config(layer_config(model_type, **SIZES), norm_before_residual=norm_before_residual)
    (directory / "draft").mkdir()
    (directory / "draft" / "draft.json").write_text(json.dumps(config))
    save_file({name: t.float() for name, t in draft_tensors(config).items()}, directory / "draft" / "draft.safetensors")
    mapping = draft_mapping(VOCAB, DRAFT_VOCAB)
    save_vocab(directory / "vocab", Vocab(mapping["d2t"], mapping["t2d"], mapping["t2d"].long()))
    cfg = ExportConfig(num_speculative_tokens=K, dtype="float32")
    write_export(directory / "draft", directory / "vocab", directory / "target", "example-org/tiny", cfg, directory / "export")
    return target


def test_the_reference_proposes_the_engines_tokens_after_every_step(tmp_path: Path) -> None:
    variants = {(m, n): tmp_path / f"{m}-{n}" for m in ("llama", "qwen3") for n in (True, False)}
    targets = {key: write_variant(path, *key) for key, path in variants.items()}
    prompts = [torch.randint(VOCAB, (2 + 5 * i,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(8)]
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    script = Path(__file__).with_name("record_proposals.py")
    command = [sys.executable, str(script), str(tmp_path / "prompts.json"), *map(str, variants.values())]
    subprocess.run(command, env=_environment("vllm"), check=True, timeout=300)
    for key, path in variants.items():
        target = targets[key]
        draft = ReferenceDraft.load(path / "export", target.get_input_embeddings().weight.detach(), torch.float32)
        proposals = json.loads((path / "proposals.json").read_text())
        assert len(proposals) > 100
        for tokens, proposed in proposals:
            with torch.no_grad():
                states = target(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
            aux = torch.stack([states[k][0] for k in LAYER_IDS], dim=1)
            assert draft.propose(tokens, aux, len(proposed)) == proposed, (key, len(tokens))
