"""The walk over a teacher-forced unroll gives the rounds and accepted counts of speculative decoding."""

from functools import cache

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from eagle3.draft.acceptance import AcceptanceCounts, walk, walk_batch
from eagle3.draft.batch import pack_rows
from eagle3.draft.decode import ReferenceDraft, speculative_generate
from eagle3.shards.hidden_states import HiddenStateRow, last_state_positions
from tests.helpers.factories import draft_config, draft_mapping, draft_tensors, tiny_target

VOCAB = 7


def hits_of(columns: list[str]) -> Tensor:
    """[I, L] bool from one string a slot, 1 for a hit."""
    return torch.tensor([[c == "1" for c in column] for column in columns]).T


def test_the_rounds_of_the_worked_example_are_walked() -> None:
    #        slot    0      1      2
    hits = hits_of(["100", "111", "111"])
    assert walk(hits, first=1, last=4, k=3) == AcceptanceCounts(2, (2, 1, 1))
    # one token longer: the answer still ends inside the second round
    assert walk(hits_of(["100", "111", "111", "111"]), 1, 5, 3) == AcceptanceCounts(2, (2, 1, 1))


def test_a_hit_after_a_miss_does_not_count() -> None:
    assert walk(hits_of(["011", "101", "000"]), 1, 4, 3) == AcceptanceCounts(2, (1, 0, 0))


def test_fewer_guesses_than_steps_look_at_the_first_steps_only() -> None:
    hits = hits_of(["111", "111", "111", "111", "111"])
    assert walk(hits, 1, 6, 1) == AcceptanceCounts(3, (3,))
    assert walk(hits, 1, 6, 2) == AcceptanceCounts(2, (2, 2))


def test_an_answer_of_one_token_has_no_round() -> None:
    counts = walk(hits_of(["1", "1"]), 2, 2, 1)
    assert counts == AcceptanceCounts.empty(1)
    assert counts.acceptance_length == 1.0
    assert counts.by_position == [0.0]


def test_counts_add_up() -> None:
    counts = AcceptanceCounts(3, (2, 1)) + AcceptanceCounts(5, (2, 0))
    assert counts == AcceptanceCounts(8, (4, 1))
    assert counts.accepted == 5
    assert counts.acceptance_length == 1 + 5 / 8
    assert counts.by_position == [0.5, 0.125]


@pytest.mark.parametrize(("first", "last", "k"), [(1, 4, 4), (1, 4, 0), (0, 3, 2), (4, 3, 2), (1, 6, 2)])
def test_positions_or_steps_that_are_not_there_are_refused(first: int, last: int, k: int) -> None:
    with pytest.raises(ValueError, match=r"must be 1 to the 3 steps|needs a token before it"):
        walk(torch.zeros(3, 4, dtype=torch.bool), first, last, k)


LONGEST = 9  # new tokens of an answer


@cache
def target_with_texts(model_type: str) -> tuple[PreTrainedModel, list[tuple[list[int], list[int]]]]:
    """A target, and prompts with each continued by its greedy tokens, as far as any k looks."""
    target, texts = tiny_target(model_type, vocab_size=VOCAB), []
    for seed in range(28):
        prompt = torch.randint(VOCAB, (2 + seed % 5,), generator=torch.Generator().manual_seed(seed)).tolist()
        tokens = list(prompt)
        with torch.no_grad():
            for _ in range(LONGEST + 3):
                tokens.append(int(target(torch.tensor([tokens])).logits[0, -1].argmax()))
        texts.append((prompt, tokens))
    return target, texts


def forced_hits(
    target: PreTrainedModel, draft: ReferenceDraft, tokens: list[int], first: int, last: int, k: int
) -> Tensor:
    """[k, last - 1] hits by the reference draft, fed the text's own tokens; slots before the answer
    stay False.
    """
    with torch.no_grad():
        states = target(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    aux = torch.stack([states[j][0] for j in draft.layer_ids], dim=1)
    hits = torch.zeros(k, last - 1, dtype=torch.bool)
    for p in range(first - 1, last - 1):
        logits = draft.propose_logits(tokens[: p + 2], aux[: p + 1], tokens[p + 2 :], k)
        hits[:, p] = draft.target_ids[logits.argmax(-1)] == torch.tensor(tokens[p + 2 : p + 2 + k])
    return hits


@pytest.mark.parametrize("k", [1, 3, 4])
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_the_walk_gives_the_counts_of_speculative_decoding_exactly(model_type: str, k: int) -> None:
    # seven tokens, five of them in the draft's vocabulary: random guesses hit often enough
    (target, texts), config = target_with_texts(model_type), draft_config(draft_vocab_size=5)
    tensors = draft_tensors(config) | draft_mapping(VOCAB, 5)
    draft = ReferenceDraft(config, tensors, target.get_input_embeddings().weight.detach(), torch.float64)
    total, cut_by_end, past_end = AcceptanceCounts.empty(k), 0, 0
    for seed, (prompt, text) in enumerate(texts):
        eos_ids = {seed % VOCAB} if seed % 3 else set()
        max_new_tokens = 3 + seed % (LONGEST - 2)
        answer, rounds, accepted = speculative_generate(target, draft, prompt, max_new_tokens, k, eos_ids)
        tokens = text[: len(prompt) + len(answer) + k - 1]
        assert tokens[: len(prompt) + len(answer)] == prompt + answer
        first, last = len(prompt), len(prompt) + len(answer) - 1
        counts = walk(forced_hits(target, draft, tokens, first, last, k), first, last, k)
        assert counts == AcceptanceCounts(rounds, tuple(accepted))
        total += counts
        cut_by_end += len(answer) < max_new_tokens
        past_end += 1 + rounds + sum(accepted) > len(answer)
    assert 0 < total.accepted < total.rounds * k
    # answers ended by an end token and by max_tokens, and rounds that accepted past the end
    assert 0 < cut_by_end < 28
    assert past_end > 0


def row(length: int, loss_mask: str) -> HiddenStateRow:
    mask = torch.tensor([c == "1" for c in loss_mask])
    positions = last_state_positions(mask)
    return HiddenStateRow(
        "r", torch.arange(length), mask, torch.zeros(length, 1, 2), torch.zeros(len(positions), 2), positions
    )


def test_each_turn_of_each_row_is_walked_on_its_own() -> None:
    # answers at positions 1-3 and 5-7 of the first row, 0-2 of the second (whose token 0 has no slot)
    batch = pack_rows([row(8, "01110111"), row(4, "1110")], 2)
    assert batch.slots.tolist() == [0, 1, 4, 5, 8]
    #                              slot 0  1     4     5     8
    hits = hits_of(["11", "10", "00", "10", "10"])
    # first answer: one round takes both; second: a miss, then a hit; third: one round
    assert walk_batch(hits, batch) == AcceptanceCounts(4, (3, 1))


def test_a_pack_without_supervised_slots_has_no_round() -> None:
    batch = pack_rows([row(3, "000")], 2)
    assert walk_batch(torch.zeros(2, 0, dtype=torch.bool), batch) == AcceptanceCounts.empty(2)
