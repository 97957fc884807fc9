"""The draft vocabulary: the most frequent target tokens of supervised text, and the maps between both ids.

    target id = draft id + d2t[draft id]      d2t [K] int64 offsets; draft ids in ascending target id order
    t2d[target id] is True                    t2d [V] bool; exactly the K target ids that have a draft id

Five target tokens, counts 4 0 7 1 0, K = 3, end of turn 4:

    kept 0 2 4    d2t 0 1 2    t2d 1 0 1 0 1    coverage 11 / 12
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3.files import atomic_path, digest_of
from eagle3.shards.tokens import TokenRow

COUNTED_AT_ONCE = (
    1 << 20
)  # ids; a count over the vocabulary for each row would cost more than reading the row

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Vocab:
    """A draft vocabulary of K of V target tokens.

    d2t: [K] int64 offsets. t2d: [V] bool. counts: [V] int64 supervised occurrences in the training data.
    """

    d2t: Tensor
    t2d: Tensor
    counts: Tensor

    @property
    def target_ids(self) -> Tensor:
        """[K] int64: target id of each draft id, ascending."""
        return torch.arange(len(self.d2t)) + self.d2t

    @property
    def coverage(self) -> float:
        """Share of supervised tokens that have a draft id; the rest can never be drafted."""
        return int(self.counts[self.t2d].sum()) / int(self.counts.sum())

    @property
    def digest(self) -> str:
        """Content digest."""
        return digest_of(*(tensor.numpy().tobytes() for tensor in (self.d2t, self.t2d, self.counts)))


class TokenCounter:
    """Counts the supervised tokens of rows, for a target with `vocab_size` V."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._counts = torch.zeros(vocab_size, dtype=torch.int64)
        self._waiting: list[Tensor] = []
        self._num_waiting = 0

    def add(self, row: TokenRow) -> None:
        """Count one row.

        Raises:
            ValueError: if a supervised token id is not the target's; names the row.
        """
        ids = torch.tensor(row.token_ids, dtype=torch.int64)[torch.tensor(row.loss_mask, dtype=torch.bool)]
        if not len(ids):
            return
        if not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab_size:
            raise ValueError(
                f"row {row.sample_id}: token ids {int(ids.min())} to {int(ids.max())} do not fit the "
                f"target's vocabulary of {self.vocab_size}; prepare the shard with this target's tokenizer"
            )
        self._waiting.append(ids)
        self._num_waiting += len(ids)
        if self._num_waiting >= COUNTED_AT_ONCE:
            self._count_waiting()

    @property
    def counts(self) -> Tensor:
        """[V] int64 supervised occurrences so far."""
        self._count_waiting()
        return self._counts

    def _count_waiting(self) -> None:
        if self._waiting:
            self._counts += torch.bincount(torch.cat(self._waiting), minlength=self.vocab_size)
            self._waiting = []
            self._num_waiting = 0


def count_tokens(rows: Iterable[TokenRow], vocab_size: int) -> Tensor:
    """[V] int64 supervised occurrences in rows; raises as `TokenCounter.add` does."""
    counter = TokenCounter(vocab_size)
    for row in rows:
        counter.add(row)
    return counter.counts


def rank_tokens(counts: Tensor, always: Sequence[int]) -> Tensor:
    """All target ids by priority for a draft vocabulary: `always`, then by count; equal counts by lower id.

    Args:
        counts: [V] int64 supervised occurrences.
        always: target ids that must be in every vocabulary.

    Returns:
        [V] int64 target ids; the first K are the draft vocabulary of size K.

    Raises:
        ValueError: if an id of `always` is not the target's.
    """
    forced = sorted(set(always))
    if forced and not 0 <= forced[0] <= forced[-1] < len(counts):
        raise ValueError(
            f"end-of-turn ids must lie below the target's {len(counts)}, got {forced}; check the target's "
            "config.json"
        )
    ranking = counts.clone()
    ranking[forced] = counts.max() + 1
    return torch.sort(ranking, descending=True, stable=True).indices


def most_frequent(counts: Tensor, size: int, always: Sequence[int]) -> Tensor:
    """[V] bool, True for the tokens of a draft vocabulary of `size`, or of V if that is less."""
    t2d = torch.zeros(len(counts), dtype=torch.bool)
    t2d[rank_tokens(counts, always)[:size]] = True
    return t2d


def coverage_by_size(counts: Tensor, always: Sequence[int]) -> list[tuple[int, float]]:
    """Share of supervised tokens inside the draft vocabulary, for every power of two as its size, and for V.

    Args:
        counts: [V] int64 supervised occurrences, not all zero.
        always: target ids that must be in every vocabulary. Sizes that cannot hold them are left out.

    Returns:
        [(K, coverage), …] in ascending K; the last K is V.
    """
    covered = counts[rank_tokens(counts, always)].cumsum(0)
    sizes = [1 << i for i in range(len(counts).bit_length()) if 1 << i < len(counts)] + [len(counts)]
    return [(size, int(covered[size - 1]) / int(covered[-1])) for size in sizes if size >= len(set(always))]


def build_vocab(counts: Tensor, size: int, always: Sequence[int]) -> Vocab:
    """Take the most frequent target tokens, equal counts by lower id, `always` before all others.

    Args:
        counts: [V] int64 supervised occurrences.
        size: K. If fewer distinct tokens occur, the lowest unused ids fill it up.
        always: target ids that must be in it, such as every end of turn.

    Raises:
        ValueError: if K exceeds V or cannot hold `always`, one of them is not below V, or all counts are 0.
    """
    target_size = len(counts)
    forced = sorted(set(always))
    if size > target_size:
        raise ValueError(
            f"draft vocab must not exceed the target's {target_size}, got {size}; lower vocab.size"
        )
    if size < max(1, len(forced)):
        raise ValueError(
            f"draft vocab must hold the {len(forced)} end-of-turn tokens, got {size}; raise vocab.size"
        )
    vocab = _vocab_of(most_frequent(counts, size, forced), counts)
    num_known = int((counts > 0).sum()) + int((counts[forced] == 0).sum())
    if num_known < size:
        logger.warning(
            "only %d distinct tokens are supervised, vocab.size is %d: the lowest unused ids fill it up",
            num_known,
            size,
        )
    return vocab


def keep_vocab(counts: Tensor, target_ids: Tensor) -> Vocab:
    """Keep the vocabulary of the draft that training starts from, with the counts of this data.

    Args:
        counts: [V] int64 supervised occurrences.
        target_ids: [K] int64 target id of each draft id, ascending.

    Raises:
        ValueError: if an id is not the target's or nothing was counted.
    """
    target_size = len(counts)
    if not (target_ids.diff() > 0).all() or not 0 <= int(target_ids[0]) <= int(target_ids[-1]) < target_size:
        raise ValueError(
            f"the initial draft must map to ascending target ids below {target_size}, got "
            f"{int(target_ids.min())} to {int(target_ids.max())}; set train.init_from to a draft for this "
            "target"
        )
    t2d = torch.zeros(target_size, dtype=torch.bool)
    t2d[target_ids] = True
    return _vocab_of(t2d, counts)


def _vocab_of(t2d: Tensor, counts: Tensor) -> Vocab:
    if not counts.any():
        raise ValueError(
            "the draft vocab needs supervised tokens, got none; check the loss masks of the shards"
        )
    kept = torch.nonzero(t2d).flatten()
    return Vocab(kept - torch.arange(len(kept)), t2d, counts)


def save_vocab(path: str | Path, vocab: Vocab) -> str:
    """Write d2t, t2d and counts as safetensors, atomically; returns the content digest."""
    with atomic_path(path) as part:
        save_file({"d2t": vocab.d2t, "t2d": vocab.t2d, "counts": vocab.counts}, part)
    return vocab.digest


def load_vocab(path: str | Path) -> Vocab:
    """Read a draft vocabulary and check that its maps agree.

    Raises:
        ValueError: if the file is unreadable or d2t, t2d and counts contradict one another; names the file.
    """
    try:
        tensors = load_file(path)
        vocab = Vocab(tensors["d2t"], tensors["t2d"], tensors["counts"])
    except (OSError, SafetensorError, KeyError) as e:
        raise ValueError(f"{path} is not a readable draft vocab ({e}); delete it and run again") from e
    if fault := _find_fault(vocab):
        raise ValueError(f"{path}: {fault}; delete it and run again")
    return vocab


def _find_fault(vocab: Vocab) -> str:
    found = [(t.dtype, t.dim()) for t in (vocab.d2t, vocab.t2d, vocab.counts)]
    if found != [(torch.int64, 1), (torch.bool, 1), (torch.int64, 1)]:
        return f"d2t must be int64 [K], t2d bool [V] and counts int64 [V], got {found}"
    if len(vocab.counts) != len(vocab.t2d):
        return f"t2d has {len(vocab.t2d)} target tokens but counts has {len(vocab.counts)}"
    if vocab.target_ids.tolist() != torch.nonzero(vocab.t2d).flatten().tolist():
        return f"d2t names other target tokens than the {int(vocab.t2d.sum())} marked in t2d"
    if not vocab.counts.any() or (vocab.counts < 0).any():
        return "counts must be natural numbers, not all of them zero"
    return ""
