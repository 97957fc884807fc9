"""No file of a target is executed or names a file elsewhere; nothing from outside is unpickled."""

import ast
import json
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from eagle3.config.engine import TargetConfig
from eagle3.targets.resolve import fetch_target
from eagle3.targets.trust import sanitize
from tests.helpers.tiny_draft import target_config

ROOT = Path(__file__).resolve().parents[2]
UNPICKLING = ("pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve")


def calls() -> list[tuple[str, ast.Call]]:
    """Every call in the code that runs, as module.function, with its file."""
    found = []
    for folder in ("eagle3", "workflows", "images"):
        for path in (ROOT / folder).rglob("*.py"):
            tree = ast.parse(path.read_text())
            found += [
                (f"{path.name}: {ast.unparse(n.func)}", n) for n in ast.walk(tree) if isinstance(n, ast.Call)
            ]
    assert len(found) > 1000
    return found


def test_no_code_of_a_target_is_ever_trusted() -> None:
    assert not [
        name for name, call in calls() for keyword in call.keywords if keyword.arg == "trust_remote_code"
    ]
    named = [path for folder in ("eagle3", "workflows", "images") for path in (ROOT / folder).rglob("*.py")]
    assert not [path.name for path in named if "trust_remote_code" in path.read_text()]


def test_nothing_from_outside_is_unpickled() -> None:
    risky = (
        "torch.load",
        "yaml.load",
        "eval",
        "exec",
        "np.load",
        "numpy.load",
        *(f"{m}.load" for m in UNPICKLING),
    )
    assert not [
        name
        for name, _ in calls()
        if name.partition(": ")[2] in risky or name.endswith((".loads_pickle", "Unpickler"))
    ]
    for folder in ("eagle3", "workflows", "images"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                assert not [n for n in names if n.partition(".")[0] in UNPICKLING], path


@pytest.fixture
def hostile(tmp_path: Path) -> tuple[Path, Path]:
    """A target with code that its files ask for; the code writes a file when it runs."""
    from tokenizers import Tokenizer, models

    source, trace = tmp_path / "source", tmp_path / "ran"
    config = LlamaConfig(
        vocab_size=3, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(source)
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE({"a": 0, "b": 1, "c": 2}, []))
    ).save_pretrained(source)
    (source / "evil.py").write_text(f"open({str(trace)!r}, 'w').close()\nclass Evil: pass\n")
    kinds = ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer")
    for name in ("config.json", "tokenizer_config.json"):
        content = json.loads((source / name).read_text())
        content["auto_map"] = {
            kind: ["evil.Evil", None] if kind == "AutoTokenizer" else "evil.Evil" for kind in kinds
        }
        (source / name).write_text(json.dumps(content))
    return source, trace


def test_a_target_that_brings_code_is_loaded_without_it(hostile: tuple[Path, Path], tmp_path: Path) -> None:
    source, trace = hostile
    out = tmp_path / "fetched"
    fetch_target(TargetConfig(name=str(source)), out)
    sanitize(out)
    assert not list(out.rglob("*.py"))
    assert not [path for path in out.glob("*.json") if "auto_map" in path.read_text()]
    assert type(AutoConfig.from_pretrained(out)) is LlamaConfig
    assert AutoTokenizer.from_pretrained(out, local_files_only=True).get_vocab() == {"a": 0, "b": 1, "c": 2}
    # Whoever agreed by mistake would find nothing to run.
    AutoModelForCausalLM.from_pretrained(out, local_files_only=True, trust_remote_code=True)
    assert not trace.exists()


def test_code_that_got_into_a_targets_directory_is_refused(hostile: tuple[Path, Path]) -> None:
    with pytest.raises(ValueError, match=r"must hold no code, got evil\.py"):
        sanitize(hostile[0])


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "sub/x.safetensors", "..", ""])
def test_an_index_that_leads_out_of_the_directory_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(target_config("llama")))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    sanitize(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": name}}))
    with pytest.raises(ValueError, match="must name files next to it"):
        sanitize(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_an_index_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"index\.json"):
        sanitize(tmp_path)
