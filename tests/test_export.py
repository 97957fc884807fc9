"""Every fault that vLLM would load silently is an error, and an export reads back equal."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3.config.training import ExportConfig
from eagle3.draft.decode import ReferenceDraft
from eagle3.draft.speculators import expected_shapes
from eagle3.export import export_config, verify_export, write_export
from eagle3.vocab import Vocab, save_vocab
from tests.helpers.exports import write_draft
from tests.helpers.factories import (
    DRAFT_VOCAB,
    LLAMA3_ROPE,
    VOCAB,
    draft_config,
    draft_mapping,
    embedding,
    layer_config,
    tiny_target,
)

NAME = "example-org/tiny-target"
CFG = ExportConfig(num_speculative_tokens=4, dtype="float32")
EVERY_TENSOR = draft_config(
    layer_config("qwen3"), norm_before_fc=True, fc_norm=True, norm_before_residual=False
)
NAMES = sorted(expected_shapes(EVERY_TENSOR))


def write_inputs(root: Path, config: dict[str, Any], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Write draft, vocabulary and target under `root`; returns the draft's tensors."""
    tiny_target(vocab_size=config["transformer_layer_config"]["vocab_size"]).save_pretrained(root / "target")
    return write_draft(root, config, dtype)


def export(root: Path, cfg: ExportConfig = CFG, name: str = NAME) -> str:
    return write_export(root / "draft", root / "vocab.safetensors", root / "target", name, cfg, root / "out")


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A verified export with every optional tensor."""
    root = tmp_path_factory.mktemp("exported")
    write_inputs(root, EVERY_TENSOR)
    export(root)
    return root / "out"


def altered(
    exported: Path, tmp_path: Path, change: Callable[[dict[str, Any], dict[str, Tensor]], Any]
) -> Path:
    """A copy of the export after `change(config, tensors)`."""
    config = json.loads((exported / "config.json").read_text())
    tensors = load_file(exported / "model.safetensors")
    change(config, tensors)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_tensor_is_named(exported: Path, tmp_path: Path, name: str) -> None:
    path = altered(exported, tmp_path, lambda config, tensors: tensors.pop(name))
    shape = list(expected_shapes(EVERY_TENSOR)[name])
    with pytest.raises(ValueError, match="would not serve") as error:
        verify_export(path)
    assert f"tensor {name} is missing, expected shape {shape}, found none" in str(error.value)


@pytest.mark.parametrize("name", NAMES)
def test_a_misshapen_tensor_is_named(exported: Path, tmp_path: Path, name: str) -> None:
    path = altered(
        exported, tmp_path, lambda config, tensors: tensors.update({name: tensors[name][1:].contiguous()})
    )
    shape = list(expected_shapes(EVERY_TENSOR)[name])
    with pytest.raises(ValueError, match="would not serve") as error:
        verify_export(path)
    assert f"tensor {name}: expected shape {shape}, found {[shape[0] - 1, *shape[1:]]}" in str(error.value)


def spoil(name: str, value: float) -> Callable[[dict[str, Any], dict[str, Tensor]], Any]:
    return lambda config, tensors: tensors[name].view(-1)[:1].fill_(value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda c, t: t.update({"embed_tokens.weight": torch.ones(3, 2)}),
            r"embed_tokens.weight \[3, 2\] is unknown",
        ),
        (
            lambda c, t: t.update({"d2t": t["d2t"].int()}),
            r"d2t \[41\]: expected dtype torch.int64, found torch.int32",
        ),
        (
            lambda c, t: t.update({"fc.weight": t["fc.weight"].half()}),
            "fc.weight .* expected dtype torch.float32",
        ),
        (
            spoil("lm_head.weight", float("nan")),
            r"lm_head.weight \[41, 64\] holds values that are not finite",
        ),
        (spoil("norm.weight", float("inf")), "norm.weight .* not finite"),
        (lambda c, t: t["fc.weight"].zero_(), "fc.weight .* zero everywhere"),
        (lambda c, t: t["t2d"].zero_(), "t2d .* zero everywhere"),
        (lambda c, t: t["d2t"][-1:].fill_(VOCAB), "d2t .* ascending target ids below 97"),
        (lambda c, t: t["d2t"][:1].fill_(-1), "d2t .* ascending target ids"),
        (lambda c, t: t.update({"d2t": t["d2t"].flip(0).contiguous()}), "d2t .* ascending target ids"),
        (lambda c, t: t.update({"t2d": ~t["t2d"]}), "t2d .* other target ids"),
    ],
)
def test_wrong_contents_of_a_tensor_are_named(
    exported: Path, tmp_path: Path, change: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        verify_export(altered(exported, tmp_path, change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c, t: c.pop("norm_before_residual"), "norm_before_residual must be true or false, got None"),
        (lambda c, t: c.update(norm_output="yes"), "norm_output must be true or false"),
        (lambda c, t: c.update(fc_norm=False), "fc_norm.0.weight .* unknown"),
        (lambda c, t: c.update(tie_word_embeddings=True), "tie_word_embeddings must be false"),
        (lambda c, t: c.update(speculators_model_type="eagle"), "must be eagle3"),
        (lambda c, t: c.update(dtype="float64"), "dtype must be one of"),
        (lambda c, t: c.update(dtype="bfloat16"), "expected dtype torch.bfloat16"),
        (lambda c, t: c.update(draft_vocab_size=98), "1 to 97 .* got 98"),
        (lambda c, t: c.update(draft_vocab_size=97), "d2t .* unknown"),
        (lambda c, t: c.update(target_hidden_size=32), "as wide as its target"),
        (
            lambda c, t: c.update(eagle_aux_hidden_state_layer_ids=[1, 2]),
            "num_aux_hidden_states must be 2, the engine reads 3",
        ),
        (lambda c, t: c.update(eagle_aux_hidden_state_layer_ids=[2, 1, 3]), "must ascend"),
        (lambda c, t: c["transformer_layer_config"].pop("rope_parameters"), "rope_parameters"),
        (
            lambda c, t: c["transformer_layer_config"].update(num_hidden_layers=2),
            "must be one llama or qwen3 layer",
        ),
        (lambda c, t: c["transformer_layer_config"].update(attention_bias=True), "attention_bias"),
        (lambda c, t: c["transformer_layer_config"].pop("vocab_size"), "a key is missing .*vocab_size"),
        (
            lambda c, t: c["speculators_config"]["verifier"].update(name_or_path="/models/mine"),
            "must have a public name",
        ),
        (lambda c, t: c["speculators_config"].update(proposal_methods=[]), "a key is missing"),
    ],
)
def test_wrong_settings_are_named(exported: Path, tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        verify_export(altered(exported, tmp_path, change))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_export_reads_back_equal(tmp_path: Path, dtype: Any) -> None:
    config = draft_config(
        layer_config(rope_parameters=LLAMA3_ROPE), eagle_aux_hidden_state_layer_ids=[0, 1, 2, 3]
    )
    tensors = write_inputs(tmp_path, config)
    digest = export(tmp_path, ExportConfig(dtype=dtype))
    stored = load_file(tmp_path / "out" / "model.safetensors")
    mapping = draft_mapping()
    assert stored.keys() == tensors.keys() | mapping.keys()
    for name, tensor in (tensors | mapping).items():
        want = tensor.to(getattr(torch, dtype)) if tensor.is_floating_point() else tensor
        assert torch.equal(stored[name], want)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["transformer_layer_config"]["rope_parameters"] == LLAMA3_ROPE
    assert written["transformer_layer_config"]["num_aux_hidden_states"] == 4
    assert digest == verify_export(tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["draft", "out", "target", "vocab.safetensors"]


def test_the_exported_draft_proposes_what_the_trained_one_proposes(tmp_path: Path) -> None:
    config = draft_config(layer_config("qwen3"), norm_output=True)
    tensors = write_inputs(tmp_path, config)
    export(tmp_path)
    aux = torch.randn(4, 3, 64, generator=torch.Generator().manual_seed(0))
    trained = ReferenceDraft(config, tensors | draft_mapping(), embedding(), torch.float32)
    served = ReferenceDraft.load(tmp_path / "out", embedding(), torch.float32)
    want = trained.propose_logits([1, 2, 3, 4, 5], aux, None, 4)
    assert torch.equal(served.propose_logits([1, 2, 3, 4, 5], aux, None, 4), want)


def test_a_draft_vocab_as_large_as_the_targets_has_no_map(tmp_path: Path) -> None:
    write_inputs(tmp_path, draft_config(draft_vocab_size=VOCAB))
    export(tmp_path)
    assert "d2t" not in load_file(tmp_path / "out" / "model.safetensors")
    draft = ReferenceDraft.load(tmp_path / "out", embedding(), torch.float32)
    assert draft.target_ids.tolist() == list(range(VOCAB))


@pytest.mark.parametrize(
    "name", ["", "/srv/models/smol", "./smol", "../smol", "~/smol", "a/b/c", "smol.gguf", "C:\\smol"]
)
def test_a_local_path_is_no_name_for_the_target(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"set target\.public_name"):
        export(tmp_path, name=name)


def test_an_existing_directory_is_no_name_for_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models" / "smol").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="got 'models/smol'"):
        export(tmp_path, name="models/smol")


def test_a_failed_check_leaves_no_export(tmp_path: Path) -> None:
    tensors = write_inputs(tmp_path, draft_config())
    del tensors["fc.weight"]
    save_file(tensors, tmp_path / "draft" / "draft.safetensors")
    with pytest.raises(ValueError, match=r"fc\.weight is missing"):
        export(tmp_path)
    assert not (tmp_path / "out").exists()


def test_a_directory_that_holds_files_is_refused_and_not_changed(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("kept")
    with pytest.raises(ValueError, match="must be absent or empty"):
        export(tmp_path)
    assert (tmp_path / "out" / "mine.txt").read_text() == "kept"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (draft_config(layer_config(max_position_embeddings=100)), "at least the target's 512, got 100"),
        (draft_config(target_hidden_size=32), "hidden_size 32, .* has 64"),
    ],
)
def test_a_draft_of_another_target_is_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    write_inputs(tmp_path, config)
    with pytest.raises(ValueError, match=message):
        export(tmp_path)


def test_a_vocab_other_than_the_trained_one_is_refused(tmp_path: Path) -> None:
    write_inputs(tmp_path, draft_config())
    mapping = draft_mapping(VOCAB, DRAFT_VOCAB - 1)
    save_vocab(tmp_path / "vocab.safetensors", Vocab(mapping["d2t"], mapping["t2d"], mapping["t2d"].long()))
    with pytest.raises(ValueError, match="maps 40 of 97 tokens, the draft was trained for 41 of 97"):
        export(tmp_path)


def test_three_aux_layers_need_no_extra_setting_and_the_number_of_speculative_tokens_is_written() -> None:
    config = export_config(draft_config(), NAME, CFG)
    assert "num_aux_hidden_states" not in config["transformer_layer_config"]
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": NAME,
        "architectures": ["LlamaForCausalLM"],
    }
