"""Digests of what the stages write, as constants: moving and renaming code must leave every one as it is.

One that changes on purpose is a new format or meaning: say so in the commit. zstd's bytes are the library's,
so of a compressed shard the decoded rows are hashed. The exported config.json names no version, but holds the
defaults of transformers' layer settings. The engine answers one row at a time in float32, and each token of
its answers leads the second best by 0.034 or more.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from eagle3.config.data import DataConfig, SourceConfig
from eagle3.config.engine import EngineConfig, RegenerateConfig
from eagle3.config.training import ExportConfig
from eagle3.data.prepare import PreparedFiles, prepare_shards
from eagle3.engine import engine as target_engine
from eagle3.engine.interface import EngineSettings
from eagle3.export import write_export
from eagle3.shards.hidden_states import read_hidden_states
from eagle3.shards.tokens import TokenRow, read_token_shard, summarise_rows
from eagle3.targets.properties import end_of_turn_ids
from eagle3.vocab import build_vocab, count_tokens, load_vocab, save_vocab
from tests.helpers.calls import OSLO, WEATHER
from tests.helpers.exports import write_draft
from tests.helpers.factories import draft_config, layer_config, tiny_target
from tests.helpers.formats import FORMATS
from tests.helpers.shard_files import token_rows, write_hidden_states
from tests.helpers.workplace import CHAT, HELDOUT, write_rows

QUESTION, RESULT = {"role": "user", "content": "Snow in Oslo?"}, {"role": "tool", "content": "snow"}
CALL = {"role": "assistant", "content": "", "tool_calls": [OSLO]}
ANSWER = {"role": "assistant", "content": "Yes."}
TASK = {"messages": [QUESTION, CALL, RESULT, ANSWER], "tools": [WEATHER]}
CHATS = [{"prompt": "Hello there, how are you?"}, {"prompt": "the answer", "response": "is 42"}, CHAT, TASK]
OWN = [{"prompt": "again", "response": "Hello again, ümlaut\n\n"}, {**TASK, "messages": [QUESTION, CALL]}]
INFO = {"target": "example-org/tiny", "layer_ids": [0, 1, 3]}
SEED = 104  # of the target: its conversation of two turns goes on to the second

PROMPT_SHARDS = {
    "shard-00000": "41ade5b27938b9773b51b2f86a8e29ff",
    "shard-00001": "d3402668b2e6d7ab13d32100e9fe35b2",
    "shard-00002": "101a1e54593892bc0e9b48f7e8ce8617",
    "tool-tasks-00000": "2d862dc0ad7e1e757bed2ec9b37d6e6a",
    "heldout": "b900b0dbdbb01857ad5105d6cf221af5",
}
WHOLE_SHARDS = {
    "shard-00000": "b191e80cc2cd32a1f8ef7b76f66e865b",
    "shard-00001": "f23dbcd7b0d242dd07bc1ea28ba32874",
    "shard-00002": "addb1680cae40233469ba7f12a958364",
    "shard-00003": "101a1e54593892bc0e9b48f7e8ce8617",
}
VOCABULARY = "106e1fe386a0bb991b92ab4ad1f45ff8"
# Of hidden states: the manifest's digest, the number of chunks, and SHA-256 over the tensors.
BF16_SHARD = ("e1db6e583ac527b1510fae037840c173", 3)
BF16_ROWS = "7c509965b552593316e44a2c70fb651f423836c6e9552db93f9e207e4df04787"
FP8_SHARD = ("5a4c8a3a2a022c6c179d965034218224", 2)
FP8_TENSORS = "c41e21c9dff988813510426cf3f9fe630b67bc2d4cf5f9e41e7f18e4bbb5b2d8"
FP8_METADATA = '{"encoding": "fp8", "compression": "none", "num_aux": 3, "hidden_size": 48}'
EXPORT = "345992e926dd4a3aadf74d1319b23ee7"
EXPORTED_FILES = {
    "config.json": "7f9dfe0e3d3ee6f2b1d0e9b0833882b8a59f7ea6564c164ffaa6812ef2e11c5d",
    "model.safetensors": "874211a83d0b580e82e22726061dd99faf9a5932f1eade626a1bff4291a03c18",
}
ANSWERED_SHARDS = {
    "shard-00000": "60764e15e9ca66ba6189bf0351a100f8",
    "shard-00001": "80d68757f168a3f9d1d80369b36a1550",
    "shard-00002": "101a1e54593892bc0e9b48f7e8ce8617",
    "tool-tasks-00000": "fe8d202f3b568e68ed05a86de0fd8d04",
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 32, the smallest that the engine's CPU attention takes; a chat template that knows tools."""
    path, tokenizer = tmp_path_factory.mktemp("target"), FORMATS["qwen3"].tokenizer()
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    model = tiny_target("qwen3", len(tokenizer), SEED, eos_token_id=tokenizer.eos_token_id, **heads)
    model.float().save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def prepared(root: Path, target: Path, regenerate: bool) -> PreparedFiles:
    """Chats and a tool task for the target to answer, or whole, beside rows that keep their own answers."""
    chats, own, heldout = (
        SourceConfig(path=str(write_rows(root / f"{name}.jsonl", rows)), name=name, regenerate=name != "own")
        for name, rows in (("chats", CHATS), ("own", OWN), ("heldout", HELDOUT))
    )
    cfg = DataConfig(sources=[chats, own], rows_per_shard=2)
    return prepare_shards(heldout, target, cfg, regenerate, root / f"shards-{regenerate}")


def rows_of(files: PreparedFiles) -> list[TokenRow]:
    return [row for file in files.shards for row in read_token_shard(file.path)]


def sha256_of(named: Iterable[tuple[str, Tensor]]) -> str:
    """Names, dtypes, shapes and bytes of tensors, in order."""
    sha = hashlib.sha256()
    for name, tensor in named:
        sha.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        sha.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def write_made_up_states(out: Path, **storage: Any) -> dict[str, Any]:
    """Whole numbers over a power of two, the same on any processor, that bf16 and fp8 have to round."""
    rows, states = token_rows(), []
    for i, row in enumerate(rows):
        numbers = (torch.arange(len(row.token_ids) * 4 * 48) * 7919 + 31 * i) % 20011 - 10005
        states.append((numbers / 1024).view(-1, 4, 48))
    return write_hidden_states(out, rows, states, 1500, INFO, **storage)


def test_prompts_with_their_scripts_make_the_same_token_shards(tmp_path: Path, target: Path) -> None:
    files = prepared(tmp_path, target, regenerate=True)
    written = [*files.shards, *files.tool_tasks, files.heldout]
    assert {file.path.stem: file.summary.digest for file in written} == PROMPT_SHARDS
    assert {f.path.stem: summarise_rows(read_token_shard(f.path)).digest for f in written} == PROMPT_SHARDS


def test_whole_conversations_make_the_same_shards_and_draft_vocabulary(tmp_path: Path, target: Path) -> None:
    files = prepared(tmp_path, target, regenerate=False)
    assert {file.path.stem: file.summary.digest for file in files.shards} == WHOLE_SHARDS
    vocab_size = json.loads((target / "config.json").read_text())["vocab_size"]
    vocab = build_vocab(count_tokens(rows_of(files), vocab_size), 24, end_of_turn_ids(target))
    assert save_vocab(tmp_path / "vocab.safetensors", vocab) == VOCABULARY
    assert load_vocab(tmp_path / "vocab.safetensors").digest == VOCABULARY


def test_compressed_bf16_states_make_the_same_manifest_digest_and_decoded_rows(tmp_path: Path) -> None:
    manifest = write_made_up_states(tmp_path, encoding="bf16", compression="zstd")
    rows = list(read_hidden_states(tmp_path))
    decoded = [(f"{r.sample_id} {k}", v) for r in rows for k, v in vars(r).items() if k != "sample_id"]
    assert (manifest["digest"], len(manifest["chunks"])) == BF16_SHARD
    assert sha256_of(decoded) == BF16_ROWS


def test_fp8_states_make_the_same_manifest_digest_and_stored_tensors(tmp_path: Path) -> None:
    manifest = write_made_up_states(tmp_path, encoding="fp8", compression="none")
    stored, metadata = [], set()
    for chunk in manifest["chunks"]:
        with safe_open(tmp_path / chunk["file"], "pt") as file:
            metadata.add(file.metadata()["states"])
            stored += [(name, file.get_tensor(name)) for name in sorted(file.keys())]
    assert metadata == {FP8_METADATA}
    assert (manifest["digest"], len(manifest["chunks"])) == FP8_SHARD
    assert sha256_of(stored) == FP8_TENSORS


def test_a_draft_makes_the_same_exported_files(tmp_path: Path) -> None:
    tiny_target().save_pretrained(tmp_path / "target")
    write_draft(tmp_path, draft_config(layer_config("qwen3"), norm_before_fc=True, fc_norm=True))
    cfg = ExportConfig(num_speculative_tokens=3, dtype="bfloat16")
    draft, vocab, target, out = (tmp_path / name for name in ("draft", "vocab.safetensors", "target", "out"))
    digest = write_export(draft, vocab, target, "example-org/tiny", cfg, out)
    found = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in out.iterdir()}
    assert (digest, found) == (EXPORT, EXPORTED_FILES)


@pytest.fixture
def closing_engines() -> Iterator[None]:
    yield
    target_engine.stop()


@pytest.mark.engine
@pytest.mark.usefixtures("closing_engines")
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_the_engine_gives_the_same_answers_at_temperature_0(tmp_path: Path, target: Path) -> None:
    files = prepared(tmp_path, target, regenerate=True)
    engine = EngineConfig(dtype="float32", max_model_len=512, max_num_seqs=1)
    settings = EngineSettings.from_dirs(target, engine)
    regenerate, found = RegenerateConfig(temperature=0.0, max_new_tokens=16, tool_parser="hermes"), {}
    for file in [*files.shards, *files.tool_tasks]:
        out, log = tmp_path / f"answered-{file.path.name}", str(tmp_path / f"log-{file.path.stem}")
        result = target_engine.regenerate(settings, file.path, out, log, regenerate)
        assert summarise_rows(read_token_shard(out)).digest == result["digest"]
        found[file.path.stem] = result["digest"]
    assert found == ANSWERED_SHARDS
