"""Drafts from elsewhere: known by content, completed, and refused with the reason where they do not fit."""

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3.config.training import ExportConfig, TrainConfig
from eagle3.draft.initial import (
    check_initial,
    fetch_initial,
    read_settings,
    resolve_initial,
    warn_of_overrides,
)
from eagle3.draft.model import load_exported
from eagle3.draft.speculators import complete_config, read_config
from eagle3.export import export_config, write_export
from eagle3.vocab import keep_vocab, save_vocab
from tests.helpers.factories import (
    DRAFT_VOCAB,
    VOCAB,
    draft_config,
    draft_mapping,
    draft_tensors,
    embedding,
    layer_config,
    tiny_target,
)

TARGET = layer_config(num_hidden_layers=4) | {"architectures": ["LlamaForCausalLM"]}
Change = Callable[[dict[str, Any], dict[str, Tensor]], Any]


def write_draft(
    path: Path, change: Change = lambda c, t: None, dtype: torch.dtype = torch.float32, **config: Any
) -> Path:
    """A draft in the Speculators format after `change(config, tensors)`."""
    path.mkdir(parents=True)
    draft = draft_config(**config)
    content = export_config(draft, "example-org/tiny", ExportConfig(dtype="float32"))
    tensors = {name: t.to(dtype) for name, t in draft_tensors(draft).items()} | draft_mapping()
    change(content, tensors)
    (path / "config.json").write_text(json.dumps(content))
    save_file(tensors, path / "model.safetensors")
    return path


def fetched(draft: Path, out: Path) -> Path:
    fetch_initial(*resolve_initial(str(draft)), TARGET, out)
    return out


def test_a_directory_a_url_and_a_run_are_known_by_their_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = write_draft(tmp_path / "draft")
    uri, digest = resolve_initial(str(draft))
    assert uri == str(draft)
    memory = fsspec.filesystem("memory")
    memory.put(str(draft), "/bucket/draft", recursive=True)
    assert resolve_initial("memory://bucket/draft/") == ("memory://bucket/draft", digest)
    (tmp_path / "runs/first").mkdir(parents=True)
    (tmp_path / "runs/first/summary.json").write_text(json.dumps({"export_dir": str(draft)}))
    monkeypatch.chdir(tmp_path)
    assert resolve_initial("runs/first") == (str(draft), digest)
    (draft / "README.md").write_text("not read")
    assert resolve_initial(str(draft))[1] == digest
    other = write_draft(tmp_path / "other", lambda c, t: t["norm.weight"].mul_(2))
    assert resolve_initial(str(other))[1] != digest
    fetch_initial("memory://bucket/draft", digest, TARGET, tmp_path / "out")
    check_initial(tmp_path / "out", TARGET, [1, 2, 3])


def test_a_hub_draft_is_fetched_at_its_commit_and_nothing_but_json_and_safetensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {}

    def snapshot_download(
        name: str, revision: str, local_dir: Path, allow_patterns: list[str], **_: Any
    ) -> None:
        asked.update(name=name, revision=revision, patterns=allow_patterns)
        for file in write_draft(tmp_path / f"hub{len(allow_patterns)}").iterdir():
            file.rename(local_dir / file.name)

    monkeypatch.setattr(
        "eagle3.draft.initial.hub_commit", lambda what, name, revision: f"commit of {name}@{revision}"
    )
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    uri, digest = resolve_initial("example-org/draft", "main")
    assert (uri, digest) == ("example-org/draft", "commit of example-org/draft@main")
    fetch_initial(uri, digest, TARGET, tmp_path / "out")
    assert asked == {"name": uri, "revision": digest, "patterns": ["config.json", "model.safetensors"]}
    check_initial(tmp_path / "out", TARGET, [1, 2, 3])
    assert (
        json.dumps(read_settings(uri, digest, TARGET), indent=2) == (tmp_path / "out/config.json").read_text()
    )
    assert asked["patterns"] == ["config.json"]


@pytest.mark.parametrize(
    "name", ["/nowhere/draft", "./draft", "~/no-such-draft", "runs/no-such-run", "a/b/c"]
)
def test_a_directory_that_is_not_there_is_named_with_what_a_pod_can_read(name: str) -> None:
    with pytest.raises(
        ValueError, match=f"{re.escape(name)}: no such directory.*hub id.*URL.*a pod cannot read"
    ):
        resolve_initial(name)


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    (write_draft(tmp_path / "draft") / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"draft has no model\.safetensors"):
        resolve_initial(str(tmp_path / "draft"))


def test_a_revision_of_a_directory_is_ignored_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    resolve_initial(str(write_draft(tmp_path / "draft")), "main")
    assert "train.init_revision 'main' is ignored" in caplog.text


def test_a_draft_that_changed_after_it_was_resolved_is_refused(tmp_path: Path) -> None:
    found = resolve_initial(str(write_draft(tmp_path / "draft")))
    (tmp_path / "draft/config.json").write_text("{}")
    with pytest.raises(ValueError, match="changed during the run"):
        fetch_initial(*found, TARGET, tmp_path / "out")


def strip(content: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """What older and hand-made files leave out, and what they add."""
    for key in (
        "norm_before_fc",
        "fc_norm",
        "norm_output",
        "target_hidden_size",
        "eagle_aux_hidden_state_layer_ids",
    ):
        del content[key]
    content["speculators_config"]["verifier"].pop("architectures")
    layer = content["transformer_layer_config"]
    layer |= {
        "rope_theta": layer.pop("rope_parameters")["rope_theta"],
        "rope_scaling": None,
        "max_position_embeddings": 64,
    }
    for key in ("attention_bias", "mlp_bias", "hidden_act", "num_hidden_layers"):
        layer.pop(key)
    for name in [n for n in tensors if n.startswith("layers.0.")]:
        tensors[name.replace("layers.0.", "midlayer.")] = tensors.pop(name)
    tensors["embed_tokens.weight"] = torch.zeros(VOCAB, 64)
    tensors.pop("t2d")


def test_what_a_file_leaves_to_defaults_is_filled_in(tmp_path: Path) -> None:
    bare = fetched(write_draft(tmp_path / "draft", strip), tmp_path / "out")
    full = read_config(fetched(write_draft(tmp_path / "full"), tmp_path / "full-out"))
    check_initial(bare, TARGET, [1, 2, 3])
    assert read_config(bare) == full
    assert full["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert full["transformer_layer_config"]["max_position_embeddings"] == TARGET["max_position_embeddings"]
    assert full["transformer_layer_config"]["rope_parameters"]["rope_theta"] == 10000.0


@pytest.mark.parametrize("size", [None, VOCAB])
def test_silent_flags_are_read_as_the_engine_reads_them(size: int | None) -> None:
    content = {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer_config(),
        "draft_vocab_size": size,
    }
    config = complete_config(content, TARGET, [1])
    flags = {"norm_before_residual": True, "norm_before_fc": False, "fc_norm": False, "norm_output": False}
    assert flags.items() <= config.items()
    assert config["draft_vocab_size"] == VOCAB


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_a_foreign_file_load_into_float32(
    tmp_path: Path, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    out = fetched(write_draft(tmp_path / "draft", strip, dtype), tmp_path / "out")
    draft, target_ids = load_exported(out, embedding().float())
    mapping = draft_mapping()
    assert target_ids.tolist() == torch.nonzero(mapping["t2d"]).flatten().tolist()
    stored = {n.replace("midlayer", "layers.0"): t for n, t in load_file(out / "model.safetensors").items()}
    for name, parameter in draft.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, stored[name].float()), name
    assert torch.equal(draft.embed(torch.tensor([3])), embedding()[[3]].float())
    assert draft.config.target_architectures == ["LlamaForCausalLM"]
    assert "its own embedding, which differs" in caplog.text


def test_a_foreign_draft_that_was_trained_on_can_be_exported(tmp_path: Path) -> None:
    tiny_target(num_attention_heads=4).save_pretrained(tmp_path / "target")
    target = json.loads((tmp_path / "target/config.json").read_text())
    fetch_initial(*resolve_initial(str(write_draft(tmp_path / "draft", strip))), target, tmp_path / "init")
    draft, target_ids = load_exported(tmp_path / "init", embedding().float())
    save_file(dict(draft.named_parameters()), tmp_path / "draft.safetensors")
    (tmp_path / "draft.json").write_text(json.dumps(draft.config.to_dict()))
    save_vocab(tmp_path / "vocab", keep_vocab(torch.ones(VOCAB, dtype=torch.int64), target_ids))
    write_export(
        tmp_path,
        tmp_path / "vocab",
        tmp_path / "target",
        "example-org/tiny",
        ExportConfig(),
        tmp_path / "out",
    )
    again, ids = load_exported(tmp_path / "out", embedding().float())
    assert again.config == draft.config
    assert torch.equal(ids, target_ids)


def test_the_targets_own_embedding_in_the_file_needs_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_draft(tmp_path / "draft", lambda c, t: t.update({"embed_tokens.weight": embedding().bfloat16()}))
    load_exported(fetched(tmp_path / "draft", tmp_path / "out"), embedding().bfloat16().float())
    assert not caplog.text


def test_a_draft_without_a_map_says_every_target_token(tmp_path: Path) -> None:
    write_draft(tmp_path / "draft", lambda c, t: [t.pop("d2t"), t.pop("t2d")], draft_vocab_size=VOCAB)
    out = fetched(tmp_path / "draft", tmp_path / "out")
    check_initial(out, TARGET, [1, 2, 3])
    assert load_exported(out, embedding().float())[1].tolist() == list(range(VOCAB))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda c, t: c.update(speculators_model_type="dflash"),
            "speculators_model_type 'eagle3'.*got 'dflash'",
        ),
        (lambda c, t: c.pop("transformer_layer_config"), "and a transformer_layer_config"),
        (
            lambda c, t: c["transformer_layer_config"].update(model_type="no-such"),
            "transformer_layer_config cannot be read",
        ),
        (lambda c, t: c["transformer_layer_config"].update(vocab_size=98), "vocab_size 97, got 98"),
        (lambda c, t: c.update(target_hidden_size=32), "hidden_size must be 64, got 32 and 64"),
        (
            lambda c, t: c["transformer_layer_config"].update(num_hidden_layers=2),
            "one llama or qwen3 layer, got 2 'llama'",
        ),
        (
            lambda c, t: c["transformer_layer_config"].update(model_type="mistral"),
            "one llama or qwen3 layer, got 1 'mistral'",
        ),
        (
            lambda c, t: c["transformer_layer_config"].update(attention_bias=True),
            "neither attention_bias nor mlp_bias",
        ),
        (
            lambda c, t: c.update(eagle_aux_hidden_state_layer_ids=[0, 1, 2]),
            r"aux layers \[0, 1, 2\], the states hold \[1, 2, 3\]",
        ),
        (lambda c, t: c.update(draft_vocab_size=98), "draft_vocab_size must be 1 to 97, got 98"),
        (lambda c, t: t.pop("fc.weight"), r"tensor fc.weight: expected shape \[64, 192\], found none"),
        (
            lambda c, t: t.update({"fc.weight": torch.ones(3, 2)}),
            r"fc.weight: expected shape \[64, 192\], found \[3, 2\]",
        ),
        (lambda c, t: t.update({"fc.bias": torch.ones(64)}), r"fc.bias \[64\] does not belong"),
        (lambda c, t: c.update(fc_norm=True), "fc_norm.0.weight: expected"),
        (lambda c, t: t.pop("d2t"), r"d2t: expected shape \[41\], found none"),
        (
            lambda c, t: t.update(d2t=t["d2t"].flip(0).contiguous()),
            "d2t must map to ascending target ids from 0 to 96",
        ),
    ],
)
def test_a_draft_that_does_not_fit_says_why(tmp_path: Path, change: Change, message: str) -> None:
    write_draft(tmp_path / "draft", change)
    with pytest.raises(ValueError, match=message):
        check_initial(fetched(tmp_path / "draft", tmp_path / "out"), TARGET, [1, 2, 3])


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    weights = write_draft(tmp_path / "draft") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"model\.safetensors is not a complete safetensors file"):
        check_initial(fetched(tmp_path / "draft", tmp_path / "out"), TARGET, [1, 2, 3])


def test_a_draft_layer_of_the_other_architecture_fits(tmp_path: Path) -> None:
    write_draft(tmp_path / "draft", transformer_layer_config=layer_config("qwen3"))
    check_initial(fetched(tmp_path / "draft", tmp_path / "out"), TARGET, [1, 2, 3])


def test_flags_that_give_way_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    out = fetched(write_draft(tmp_path / "draft", norm_before_residual=False), tmp_path / "out")
    with caplog.at_level(logging.WARNING):
        warn_of_overrides(out, TrainConfig(norm_output=True))
    assert [r.getMessage() for r in caplog.records] == [
        "train.norm_before_residual is ignored: the initial draft has false",
        "train.norm_output is ignored: the initial draft has false",
    ]


def test_the_number_of_draft_tokens_is_the_files(tmp_path: Path) -> None:
    assert (
        read_config(fetched(write_draft(tmp_path / "draft"), tmp_path / "out"))["draft_vocab_size"]
        == DRAFT_VOCAB
    )
