"""Acceptance counts, and the walk that predicts the engine's exact counts from one teacher-forced unroll.

The engine accepts a chain of guesses up to its first miss. Up to there the guesses equal the answer's tokens,
so an unroll over the target's own greedy answer shows what serving would accept at every position. The walk
takes the same rounds as serving. Example with k = 3: prompt token x, answer a b c E that ends at E; the
target would write f g after E:

    position         0       1        2        3        4       5   6
    token            x       a        b        c        E       f   g
    slot's labels    b c E   c E f    E f g    –        –       –   –
    round here       no      always   maybe    maybe    never: the answer has ended

The prefill yields the first token, a, and is no round. A round at t[m] reads slot m - 1, accepts its n
leading hits (at most k) and emits n + 1 tokens. The next round is at t[m + n + 1] if that is before the
answer's last token, whether an end token or max_tokens ended the answer. With hits b, then E f g:

    round at a:  guesses b x x   n = 1   emits b c
    round at c:  guesses E f g   n = 3   emits E: all three are counted although f and g are cut off
    rounds 2, accepted 4, by position 2 1 1

The labels of the last possible round reach k - 1 tokens past the end: continue the answer by that many.

vLLM 0.32 (v1/core/sched/scheduler.py, `update_from_output`) counts a round's accepted guesses before it cuts
them at the end token or max_tokens. max_tokens shortens no round, and a round that async scheduling began for
a finished request is not counted. The walk ignores two cases: near max_model_len rounds get fewer guesses
(never while prompt + max_tokens + 2k <= max_model_len), and a prompt that the prefix cache holds except for
one token gets an extra round with nothing accepted (measure on new prompts).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3.draft.batch import PackedBatch
from eagle3.draft.loss import chunk_slots


@dataclass(frozen=True)
class AcceptanceCounts:
    """Rounds (target passes with guesses), and the guesses accepted at each of k positions."""

    rounds: int
    accepted_by_position: tuple[int, ...]

    @classmethod
    def empty(cls, k: int) -> "AcceptanceCounts":
        """Counts before the first round of k guesses."""
        return cls(0, (0,) * k)

    def __add__(self, other: "AcceptanceCounts") -> "AcceptanceCounts":
        pairs = zip(self.accepted_by_position, other.accepted_by_position, strict=True)
        return AcceptanceCounts(self.rounds + other.rounds, tuple(a + b for a, b in pairs))

    @property
    def accepted(self) -> int:
        """Accepted guesses of all rounds."""
        return sum(self.accepted_by_position)

    @property
    def acceptance_length(self) -> float:
        """Mean tokens emitted per target pass, including the target's own token; 1 without rounds."""
        return 1 + self.accepted / self.rounds if self.rounds else 1.0

    @property
    def by_position(self) -> list[float]:
        """Share of rounds in which guess 1 … k was accepted; zeros without rounds."""
        return [count / max(1, self.rounds) for count in self.accepted_by_position]


def guess(states: Tensor, head: Tensor, target_ids: Tensor) -> Tensor:
    """The draft's argmax as target token ids.

    Args:
        states: [I, S, H] from Eagle3Draft.forward.
        head: [K, H] draft head, dtype of states.
        target_ids: [K] int64 target ids of the draft vocabulary.

    Returns:
        [I, S] int64.
    """
    size = chunk_slots(len(target_ids), states.device)
    steps = [torch.cat([(x @ head.T).argmax(-1) for x in step.split(size)]) for step in states]
    return target_ids[torch.stack(steps)]


def find_hits(guesses: Tensor, batch: PackedBatch) -> Tensor:
    """[I, S] bool, True where the pair is valid and its guess [I, S] equals the label."""
    return (guesses == batch.labels()) & batch.valid


def walk(hits: Tensor, first: int, last: int, k: int) -> AcceptanceCounts:
    """Walk one answer as the engine does.

    Args:
        hits: [I, L] bool; hits[i, p]: the step-i guess of slot p equals the token at p + 2 + i. The walk
            reads slots first - 1 … last - 2.
        first: position of the answer's first token, at least 1.
        last: position of the answer's last token (its end token, or the one that reached max_tokens).
        k: guesses per round, at most I.
    """
    num_steps, length = hits.shape
    if not 1 <= k <= num_steps:
        raise ValueError(f"k must be 1 to the {num_steps} steps of the unroll, got {k}; unroll more steps")
    if not 1 <= first <= last <= length + 1:
        raise ValueError(
            f"an answer at positions {first} to {last} needs a token before it and {last - 1} slots, "
            f"got {length}; unroll the whole answer"
        )
    leading = hits[:k].int().cumprod(0).sum(0).tolist()
    rounds = 0
    accepted = [0] * k
    at = first
    while at < last:
        kept = leading[at - 1]
        rounds += 1
        for position in range(kept):
            accepted[position] += 1
        at += kept + 1
    return AcceptanceCounts(rounds, tuple(accepted))


def walk_batch(hits: Tensor, batch: PackedBatch) -> AcceptanceCounts:
    """Walk every answer of a pack, k = I.

    Guesses past an answer's end count as misses, so its last round may lose some that the engine would count.
    For exact counts use `walk` with continued answers.

    Args:
        hits: [I, S] bool of the batch's slots, False where not valid. A run of adjacent slots p … q is one
            answer, from position p + 1 to position q + 2.
    """
    num_steps = len(hits)
    dense = torch.zeros(num_steps, len(batch.token_ids), dtype=torch.bool)
    slots = batch.slots.cpu()
    dense[:, slots] = hits.cpu()
    counts = AcceptanceCounts.empty(num_steps)
    if not len(slots):
        return counts
    cuts = torch.nonzero(slots.diff() > 1).flatten() + 1
    for run in slots.tensor_split(cuts.tolist()):
        counts += walk(dense, int(run[0]) + 1, int(run[-1]) + 2, num_steps)
    return counts
