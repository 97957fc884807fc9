"""The sink of captured rows: order restored, wrong states refused; nothing here starts an engine."""

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from eagle3.config import ExtractConfig
from eagle3.shards import TokenRow, read_hidden_states
from eagle3.target.capture import ShardSink
from eagle3.target.reference import BATCH_TOKENS, batches
from tests.draft.factories import tiny_target

FLOAT32 = ExtractConfig(storage_dtype="float32")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    path = tmp_path_factory.mktemp("target")
    model = tiny_target("llama").float()
    model.save_pretrained(path)
    return path, model


def random_rows(count: int) -> list[TokenRow]:
    rng = random.Random(0)
    lengths = [1 + rng.randrange(30) for _ in range(count)]
    return [TokenRow(f"row-{i}", "test", [rng.randrange(97) for _ in range(n)], [True] * n) for i, n in enumerate(lengths)]


def states_of(model: PreTrainedModel, row: TokenRow) -> tuple[Tensor, int]:
    """[T, 2, H] state after layer 1 and last state, and the next token; the last state is what goes into the final norm."""
    kept = []
    hook = model.base_model.norm.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    with torch.no_grad():
        output = model(torch.tensor([row.token_ids]), output_hidden_states=True)
    hook.remove()
    return torch.stack([output.hidden_states[1][0], kept[0][0]], dim=1), int(output.logits[0, -1].argmax())


def test_rows_that_come_in_any_order_are_written_in_the_shards(tmp_path: Path, target: tuple[Path, PreTrainedModel]) -> None:
    path, model = target
    rows = random_rows(9)
    sink = ShardSink(rows, tmp_path, FLOAT32, {})
    for i in random.Random(1).sample(range(9), 9):
        sink.add(i, *states_of(model, rows[i]))
    assert sink.close(str(path), "float32")["rows"] == 9
    for row, stored in zip(rows, read_hidden_states(tmp_path), strict=True):
        assert (stored.sample_id, stored.token_ids.tolist()) == (row.sample_id, row.token_ids)
        assert torch.equal(stored.aux[:, 0], states_of(model, row)[0][:, 0])


def test_a_last_state_from_one_layer_early_or_after_the_norm_is_refused(
    tmp_path: Path, target: tuple[Path, PreTrainedModel]
) -> None:
    path, model = target
    early = ShardSink(random_rows(9), tmp_path, FLOAT32, {})
    for i, row in enumerate(early.rows):
        states, next_token = states_of(model, row)
        early.add(i, states.flip(1), next_token)
    with pytest.raises(RuntimeError, match=r"only .*% of 9 rows"):
        early.close(str(path), "float32")
    assert not (tmp_path / "manifest.json").exists()


def test_batches_hold_every_row_once_and_bound_the_padding() -> None:
    lengths = [random.Random(0).randrange(1, 300) for _ in range(99)] + [2 * BATCH_TOKENS]
    groups = batches(lengths, max_rows=7)
    assert sorted(i for group in groups for i in group) == list(range(100))
    assert all(len(g) <= 7 for g in groups)
    assert all(len(g) == 1 or len(g) * max(lengths[i] for i in g) <= BATCH_TOKENS for g in groups)
