"""Both layouts of the synthetic states hold the same tokens, masks, states and vocabulary."""

from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import load_from_disk
from safetensors.torch import load_file

from eagle3.shards.hidden_states import last_state_positions, read_hidden_states
from eagle3.vocab import load_vocab
from tests.benchmarks.states import ROW_TOKENS, TINY, make_rows, write_both


@pytest.mark.parametrize("supervised", [1.0, 0.5, 0.2])
def test_both_layouts_hold_the_same(tmp_path: Path, supervised: float) -> None:
    write_both(tmp_path, 3, supervised, TINY)
    table = load_from_disk(str(tmp_path / "peer"))
    ours = list(read_hidden_states(tmp_path / "ours" / "shard"))
    assert len(table) == len(ours) == 3
    for i, row in enumerate(ours):
        states = load_file(tmp_path / "peer" / "hidden_states" / f"hs_{i}.safetensors")
        assert table[i]["input_ids"].tolist() == states["token_ids"].tolist() == row.token_ids.tolist()
        assert table[i]["loss_mask"].tolist() == row.loss_mask.int().tolist()
        assert table[i]["seq_len"] == len(row.token_ids) == ROW_TOKENS
        assert torch.equal(states["hidden_states"][:, :-1], row.aux)
        assert torch.equal(states["hidden_states"][last_state_positions(row.loss_mask), -1], row.last)
    vocab = load_vocab(tmp_path / "ours" / "vocab.safetensors")
    assert np.array_equal(np.load(tmp_path / "peer" / f"d2t-{TINY.draft_vocab}.npy"), vocab.d2t.numpy())
    assert np.array_equal(np.load(tmp_path / "peer" / f"t2d-{TINY.draft_vocab}.npy"), vocab.t2d.numpy())


@pytest.mark.parametrize("supervised", [1.0, 0.5, 0.2])
def test_the_supervised_tokens_are_one_answer_of_the_wanted_share(supervised: float) -> None:
    for row in make_rows(2, supervised, 512):
        mask = torch.tensor(row.loss_mask)
        assert mask.float().mean().item() == pytest.approx(supervised, abs=1 / ROW_TOKENS)
        assert mask.int().diff().abs().sum() <= 1  # one change, from prompt to answer
        assert mask[-1]
