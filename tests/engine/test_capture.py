"""The sink of captured rows: order restored, wrong states refused, chunks gone on from; nothing here starts an engine."""

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from eagle3.config.engine import ExtractConfig
from eagle3.engine.capture import CHECKED_ROWS, ShardSink
from eagle3.engine.reference import BATCH_TOKENS, batches
from eagle3.shards.hidden_states import read_hidden_states, read_manifest
from eagle3.shards.tokens import TokenRow
from tests.helpers.factories import tiny_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    path = tmp_path_factory.mktemp("target")
    model = tiny_target("llama").float()
    model.save_pretrained(path)
    return path, model


def random_rows(count: int) -> list[TokenRow]:
    rng = random.Random(0)
    lengths = [1 + rng.randrange(30) for _ in range(count)]
    return [
        TokenRow(f"row-{i}", "test", [rng.randrange(97) for _ in range(n)], [True] * n)
        for i, n in enumerate(lengths)
    ]


def states_of(model: PreTrainedModel, row: TokenRow) -> tuple[Tensor, int]:
    """[T, 2, H] state after layer 1 and last state, and the next token; the last state is what goes into the final norm."""
    kept = []
    hook = model.base_model.norm.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    with torch.no_grad():
        output = model(torch.tensor([row.token_ids]), output_hidden_states=True)
    hook.remove()
    return torch.stack([output.hidden_states[1][0], kept[0][0]], dim=1), int(output.logits[0, -1].argmax())


def open_sink(rows: list[TokenRow], out: Path, target_dir: Path, chunk_bytes: int = 1 << 30) -> ShardSink:
    extract = ExtractConfig(encoding="fp32", chunk_bytes=chunk_bytes)
    return ShardSink(rows, out, 1, extract, {"target": "tiny"}, target_dir, "float32")


def test_rows_that_come_in_any_order_are_written_in_the_shards(
    tmp_path: Path, target: tuple[Path, PreTrainedModel]
) -> None:
    path, model = target
    rows = random_rows(9)
    sink = open_sink(rows, tmp_path, path, chunk_bytes=4000)
    for i in random.Random(1).sample(range(9), 9):
        sink.add(i, *states_of(model, rows[i]))
    manifest = sink.close()
    assert len(manifest["chunks"]) > 1
    assert manifest["checks"] == {"rows_sound": 9, "next_tokens_checked": 9, "next_tokens_agreed": 9}
    for row, stored in zip(rows, read_hidden_states(tmp_path), strict=True):
        assert (stored.sample_id, stored.token_ids.tolist()) == (row.sample_id, row.token_ids)
        assert torch.equal(stored.aux[:, 0], states_of(model, row)[0][:, 0])


def test_rows_are_wanted_chunk_by_chunk_with_the_longest_first(
    tmp_path: Path, target: tuple[Path, PreTrainedModel]
) -> None:
    rows = random_rows(60)
    sink = open_sink(rows, tmp_path, target[0], chunk_bytes=20_000)
    assert len(sink.writer.plan) > 3
    wanted = iter(sink.wanted)
    for frames in sink.writer.plan:
        of_chunk = [next(wanted) for frame in frames for _ in frame]
        assert sorted(of_chunk) == [row for frame in frames for row in frame]
        firsts = [
            max(len(rows[r].token_ids) for r in frame)
            for row in of_chunk
            for frame in frames
            if frame[0] == row
        ]
        assert firsts == sorted(firsts, reverse=True)
    sink.writer.stop()


def test_every_chunk_is_checked_on_a_sample_of_its_rows(
    tmp_path: Path, target: tuple[Path, PreTrainedModel]
) -> None:
    path, model = target
    rows = random_rows(3 * CHECKED_ROWS)
    sink = open_sink(rows, tmp_path, path)
    for i in sink.wanted:
        sink.add(i, *states_of(model, rows[i]))
    checks = sink.close()["checks"]
    assert checks == {
        "rows_sound": len(rows),
        "next_tokens_checked": CHECKED_ROWS,
        "next_tokens_agreed": CHECKED_ROWS,
    }


def test_a_last_state_from_one_layer_early_is_refused_with_the_first_chunk(
    tmp_path: Path, target: tuple[Path, PreTrainedModel]
) -> None:
    path, model = target
    early = open_sink(random_rows(60), tmp_path, path, chunk_bytes=20_000)
    added = []

    def add_all() -> None:
        for i in early.wanted:
            states, next_token = states_of(model, early.rows[i])
            early.add(i, states.flip(1), next_token)
            added.append(i)
            for chunk in early.writer.chunks:
                chunk.exception()

    with pytest.raises(RuntimeError, match=r"next token in only \d+ of \d+ rows, 99% must agree"):
        add_all()
    assert len(added) < 60
    early.writer.stop()
    assert not list(tmp_path.glob("chunk-*"))
    assert not (tmp_path / "manifest.json").exists()


def test_a_state_that_was_normed_twice_is_refused(
    tmp_path: Path, target: tuple[Path, PreTrainedModel]
) -> None:
    model = copy.deepcopy(target[1])
    with torch.no_grad():
        model.base_model.norm.weight.copy_(torch.linspace(-1, 2, model.config.hidden_size))
    model.save_pretrained(tmp_path / "other")
    sink = open_sink(random_rows(9), tmp_path / "out", tmp_path / "other")
    for i, row in enumerate(sink.rows):
        states, next_token = states_of(model, row)
        with torch.no_grad():
            sink.add(i, torch.stack([states[:, 0], model.base_model.norm(states[:, 1])], dim=1), next_token)
    with pytest.raises(RuntimeError, match="only"):
        sink.close()


def test_what_an_earlier_attempt_finished_is_kept_with_its_checks(
    tmp_path: Path, target: tuple[Path, PreTrainedModel]
) -> None:
    path, model = target
    rows = random_rows(60)

    def fill(sink: ShardSink, until: int) -> None:
        for i in sink.wanted[:until]:
            sink.add(i, *states_of(model, rows[i]))

    whole = open_sink(rows, tmp_path / "whole", path, chunk_bytes=20_000)
    fill(whole, 60)
    expected: dict[str, Any] = whole.close()
    first = open_sink(rows, tmp_path / "parts", path, chunk_bytes=20_000)
    fill(first, 35)
    first.writer.stop()
    written = {f: f.stat().st_mtime_ns for f in (tmp_path / "parts").glob("chunk-*.safetensors")}
    assert 0 < len(written) < len(expected["chunks"])
    second = open_sink(rows, tmp_path / "parts", path, chunk_bytes=20_000)
    assert len(second.writer.entries) == len(written)
    assert len(second.wanted) < 60
    fill(second, 60)
    assert second.close() == expected == read_manifest(tmp_path / "parts")
    assert {f: f.stat().st_mtime_ns for f in written} == written


def test_batches_hold_every_row_once_and_bound_the_padding() -> None:
    lengths = [random.Random(0).randrange(1, 300) for _ in range(99)] + [2 * BATCH_TOKENS]
    groups = batches(lengths, max_rows=7)
    assert sorted(i for group in groups for i in group) == list(range(100))
    assert all(len(g) <= 7 for g in groups)
    assert all(len(g) == 1 or len(g) * max(lengths[i] for i in g) <= BATCH_TOKENS for g in groups)
