"""States and answers of the real engine against transformers: per layer, batched, chunked, cached; what a failure says."""

import logging
import os
import random
import re
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from eagle3.config.engine import EngineConfig, ExtractConfig
from eagle3.engine.engine import capture, generate, stop
from eagle3.engine.interface import EngineSettings
from eagle3.errors import EngineDied
from eagle3.regenerate.answers import Sampling
from eagle3.shards.hidden_states import read_hidden_states
from eagle3.shards.tokens import TokenRow, write_token_shard
from eagle3.targets.properties import aux_layer_ids
from eagle3.targets.weights import load_target_tensors
from tests.helpers.engine_jobs import engine_pid
from tests.helpers.factories import greedy_answer, tiny_target

pytestmark = pytest.mark.engine

VOCAB, END, LAYER_IDS = 97, 2, [0, 1, 3]
FLOAT32 = ExtractConfig(encoding="fp32", chunk_bytes=100_000)
# 48 tokens a step: prompts up to 128 tokens are prefilled in pieces, several rows at once.
CHUNKED = EngineConfig(dtype="float32", max_model_len=128, max_num_seqs=32, max_num_batched_tokens=48)
SINGLE = EngineConfig(dtype="float32", max_model_len=128, max_num_seqs=1, max_num_batched_tokens=128)
# Measured 1.2e-5 of a token's largest activation: the same float32 sums in another order, four layers deep.
TOLERANCE = 1e-4


@pytest.fixture(scope="module", autouse=True)
def _engines() -> Iterator[None]:
    yield
    stop()


def save_target(directory: Path, model_type: str, **sizes: int) -> PreTrainedModel:
    """Heads of 32, the smallest that the engine's CPU attention takes."""
    heads = {"vocab_size": VOCAB, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    model = tiny_target(model_type, **heads | sizes, eos_token_id=END).float()
    model.save_pretrained(directory)
    return model


def random_rows() -> list[TokenRow]:
    """Rows of 1 … 128 tokens; every other one starts with the same 70, two blocks of the engine's cache and a bit."""
    rng = random.Random(0)
    shared = [rng.randrange(VOCAB) for _ in range(70)]
    lengths = [1, 2, 32, 33, 64, 128] + [rng.randrange(3, 129) for _ in range(34)]
    rows = []
    for i, length in enumerate(lengths):
        tokens = ((shared if i % 2 else []) + [rng.randrange(VOCAB) for _ in range(128)])[:length]
        rows.append(TokenRow(f"row-{i}", "test", tokens, [j > 0 for j in range(length)]))
    return rows


def expected_states(
    model: PreTrainedModel, row: TokenRow, layer_ids: list[int] = LAYER_IDS
) -> tuple[Tensor, Tensor]:
    """[T, A + 1, H] states of the layers and the last layer before the final norm; [T] the model's own next tokens."""
    kept: list[Tensor] = []
    hook = model.base_model.norm.register_forward_pre_hook(lambda _, args: kept.append(args[0][0]))
    with torch.no_grad():
        output = model(torch.tensor([row.token_ids]), output_hidden_states=True)
    hook.remove()
    states = torch.stack([*(output.hidden_states[k][0] for k in layer_ids), kept[0]], dim=1)
    return states, output.logits[0].argmax(-1)


def largest_error(found: Tensor, expected: Tensor) -> float:
    """Largest deviation of a token's state, as a share of that state's largest activation."""
    if len(found) == 0:
        return 0.0
    return float(((found - expected).abs().amax(-1) / expected.abs().amax(-1)).max())


def assert_states_are_the_models(
    model: PreTrainedModel, rows: list[TokenRow], shard_dir: Path, layer_ids: list[int] = LAYER_IDS
) -> None:
    for row, stored in zip(rows, read_hidden_states(shard_dir), strict=True):
        states, _ = expected_states(model, row, layer_ids)
        assert (stored.sample_id, stored.token_ids.tolist()) == (row.sample_id, row.token_ids)
        for layer, name in enumerate(layer_ids):
            assert largest_error(stored.aux[:, layer], states[:, layer]) < TOLERANCE, (row.sample_id, name)
        assert largest_error(stored.last, states[stored.last_positions, -1]) < TOLERANCE, row.sample_id


def capture_rows(
    target: Path,
    rows: list[TokenRow],
    out: Path,
    engine: EngineConfig,
    layer_ids: list[int] = LAYER_IDS,
    num_ranks: int = 1,
) -> dict[str, Any]:
    write_token_shard(out.with_suffix(".parquet"), rows)
    settings = EngineSettings.from_dirs(target, engine, layer_ids=layer_ids, tensor_parallel_size=num_ranks)
    return capture(settings, out.with_suffix(".parquet"), out, FLOAT32, {"target": "tiny"})


def cached_tokens(caplog: pytest.LogCaptureFixture) -> int:
    return int(re.findall(r"(\d+) came from the prefix cache", caplog.text)[-1])


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_captured_states_equal_the_models_chunked_batched_and_cached(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, model_type: str
) -> None:
    caplog.set_level(logging.INFO)
    model, rows = save_target(tmp_path / "target", model_type), random_rows()
    manifest = capture_rows(tmp_path / "target", rows, tmp_path / "chunked", CHUNKED)
    assert (manifest["rows"], manifest["tokens"]) == (len(rows), sum(len(r.token_ids) for r in rows))
    assert manifest["info"]["layer_ids"] == LAYER_IDS
    assert manifest["info"]["engine_version"].startswith("vllm")
    assert len(manifest["chunks"]) > 1
    assert cached_tokens(caplog) > 0
    assert_states_are_the_models(model, rows, tmp_path / "chunked")

    backwards = capture_rows(tmp_path / "target", rows[::-1], tmp_path / "cached", CHUNKED)
    assert backwards["tokens"] == manifest["tokens"]
    assert cached_tokens(caplog) > 0.5 * manifest["tokens"]
    assert_states_are_the_models(model, rows[::-1], tmp_path / "cached")

    capture_rows(tmp_path / "target", rows, tmp_path / "single", SINGLE)
    assert_states_are_the_models(model, rows, tmp_path / "single")


def test_a_target_of_two_layers_is_captured_with_its_default_layers(tmp_path: Path) -> None:
    model, rows = save_target(tmp_path / "target", "llama", num_hidden_layers=2), random_rows()[:9]
    layer_ids = aux_layer_ids([], 2)
    assert layer_ids == [1]
    manifest = capture_rows(tmp_path / "target", rows, tmp_path / "states", CHUNKED, layer_ids)
    assert manifest["info"]["layer_ids"] == [1]
    assert_states_are_the_models(model, rows, tmp_path / "states", layer_ids)


def test_a_target_split_over_two_ranks_hands_over_the_same_states(tmp_path: Path) -> None:
    sizes = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 80,
        "vocab_size": 128,
    }
    model, rows = save_target(tmp_path / "target", "llama", **sizes), random_rows()[:12]
    manifest = capture_rows(tmp_path / "target", rows, tmp_path / "states", CHUNKED, num_ranks=2)
    assert manifest["info"]["tensor_parallel_size"] == 2
    assert manifest["checks"]["next_tokens_agreed"] == 12
    assert_states_are_the_models(model, rows, tmp_path / "states")


def test_stored_last_state_norm_and_head_give_the_targets_next_token(tmp_path: Path) -> None:
    model, rows = save_target(tmp_path / "target", "llama"), random_rows()
    capture_rows(tmp_path / "target", rows, tmp_path / "states", CHUNKED)
    target = load_target_tensors(tmp_path / "target")
    right, total = 0, 0
    for row, stored in zip(rows, read_hidden_states(tmp_path / "states"), strict=True):
        normed = torch.nn.functional.rms_norm(stored.last, (64,), target.norm_weight, target.norm_eps)
        chosen = (normed @ target.head.T).argmax(-1)
        right += int((chosen == expected_states(model, row)[1][stored.last_positions]).sum())
        total += len(chosen)
    assert total > 2000
    assert right >= 0.99 * total


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_greedy_answers_are_the_models_own(tmp_path: Path, model_type: str) -> None:
    model = save_target(tmp_path, model_type)
    prompts = [r.token_ids[:40] for r in random_rows()]
    greedy = Sampling(temperature=0.0, top_p=1.0, max_new_tokens=24)
    settings = EngineSettings.from_dirs(tmp_path, CHUNKED)
    generation = generate(settings, prompts, greedy)
    for prompt, given in zip(prompts, generation.answers, strict=True):
        assert (given.token_ids, given.finish_reason) == greedy_answer(model, prompt, 24, END)
    assert {a.finish_reason for a in generation.answers} == {"stop", "length"}
    endless = generate(settings, prompts, replace(greedy, ignore_eos=True))
    assert {len(a.token_ids) for a in endless.answers} == {24}
    assert (generation.num_drafts, generation.accepted_per_position) == (0, ())
    assert generation.generated_tokens == sum(len(a.token_ids) for a in generation.answers)
    random_sampling = replace(greedy, temperature=1.0)
    sampled = [generate(settings, prompts, random_sampling, seed).answers for seed in (1, 2, 1)]
    assert sampled[0] == sampled[2] != sampled[1]


def test_failures_arrive_with_their_message_and_the_next_call_works(tmp_path: Path) -> None:
    save_target(tmp_path, "llama")

    def answer(engine: EngineConfig, count: int = 1) -> int:
        prompts = [[1, 2, i % VOCAB] for i in range(count)]
        greedy = Sampling(temperature=0.0, top_p=1.0, max_new_tokens=100, ignore_eos=True)
        return generate(EngineSettings.from_dirs(tmp_path, engine), prompts, greedy).generated_tokens

    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        answer(CHUNKED.model_copy(update={"max_num_batched_tokens": 16}))
    assert answer(CHUNKED) == 100
    threading.Timer(1.0, os.kill, (engine_pid(), signal.SIGKILL)).start()
    with pytest.raises(EngineDied, match=r"killed \(signal 9\).*memory"):
        answer(CHUNKED, count=2000)
    assert answer(CHUNKED) == 100
