"""The rows as they stand, by source: figures, sample rows, and the count of every supervised token.

Rows come one by one, so that memory holds one shard; what is kept of them is a directory of two files:

    rows.json            figures {source: {rows, tokens, supervised_tokens, lengths}}, samples, end_of_turn_ids
    counts.safetensors   counts [S, V] int64, a line a source in the order of `figures`
"""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3.data.chat import sample_of
from eagle3.data.tally import length_bin
from eagle3.shards.tokens import TokenRow
from eagle3.vocab import TokenCounter, coverage_by_size

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SAMPLES_OF_A_SOURCE = 2


@dataclass
class _Source:
    """What is kept of one source's rows."""

    counter: TokenCounter
    rows: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    lengths: Counter[int] = field(default_factory=Counter)
    first: list[TokenRow] = field(default_factory=list)

    def add(self, row: TokenRow) -> None:
        self.counter.add(row)
        self.rows += 1
        self.tokens += len(row.token_ids)
        self.supervised_tokens += sum(row.loss_mask)
        self.lengths[length_bin(len(row.token_ids))] += 1
        if len(self.first) < SAMPLES_OF_A_SOURCE:
            self.first.append(row)

    def figures(self) -> dict[str, Any]:
        counts = {"rows": self.rows, "tokens": self.tokens, "supervised_tokens": self.supervised_tokens}
        return counts | {"lengths": sorted([size, rows] for size, rows in self.lengths.items())}


@dataclass(frozen=True)
class Description:
    """What a run's rows are.

    figures: {source: {rows, tokens, supervised_tokens, lengths [[tokens at most, rows], …]}}. samples: [{sample_id, source,
    tokens, spans [[text, supervised], …]}]. end_of_turn_ids: in every draft vocabulary. counts: [S, V] int64 supervised
    occurrences, a line a source in the order of `figures`.
    """

    figures: dict[str, dict[str, Any]]
    samples: list[dict[str, Any]]
    end_of_turn_ids: list[int]
    counts: Tensor

    @property
    def total(self) -> Tensor:
        """[V] int64 supervised occurrences in all sources."""
        return self.counts.sum(0)


def describe_rows(
    rows: Iterable[TokenRow],
    tokenizer: "PreTrainedTokenizerBase",
    vocab_size: int,
    end_of_turn_ids: list[int],
    num_samples: int,
) -> Description:
    """Go through the rows once.

    Args:
        rows: conversations of all shards, in order.
        tokenizer: the target's, for the samples.
        vocab_size: V of the target.
        end_of_turn_ids: of the target.
        num_samples: rows shown at most: the first of each source, then the second of each.

    Raises:
        ValueError: if a supervised token id is not the target's; names the row.
    """
    sources: dict[str, _Source] = {}
    for row in rows:
        if row.source not in sources:
            sources[row.source] = _Source(TokenCounter(vocab_size))
        sources[row.source].add(row)
    chosen = [(i, s, row) for s, source in enumerate(sources.values()) for i, row in enumerate(source.first)]
    shown = sorted(sorted(chosen, key=lambda c: c[:2])[:num_samples], key=lambda c: (c[1], c[0]))
    counts = [source.counter.counts for source in sources.values()]
    return Description(
        figures={name: source.figures() for name, source in sources.items()},
        samples=[sample_of(tokenizer, row) for _, _, row in shown],
        end_of_turn_ids=sorted(end_of_turn_ids),
        counts=torch.stack(counts) if counts else torch.zeros(0, vocab_size, dtype=torch.int64),
    )


def coverage_figures(description: Description, t2d: Tensor) -> dict[str, Any]:
    """How much of the supervised text a draft vocabulary can say.

    Args:
        description: of rows of which at least one token is supervised.
        t2d: [V] bool, True for the target tokens of the draft vocabulary.

    Returns:
        JSON-ready: size K, coverage (share of supervised tokens inside), by_source {name: [inside, supervised]}, by_size
        [[K, coverage], …] for the most frequent K tokens, K a power of two or V.
    """
    inside, supervised = description.counts[:, t2d].sum(1).tolist(), description.counts.sum(1).tolist()
    return {
        "size": int(t2d.sum()),
        "coverage": sum(inside) / sum(supervised),
        "by_source": {
            name: list(pair) for name, *pair in zip(description.figures, inside, supervised, strict=True)
        },
        "by_size": [
            list(point) for point in coverage_by_size(description.total, description.end_of_turn_ids)
        ],
    }


def write_description(directory: str | Path, description: Description) -> None:
    """Write both files into a directory."""
    path = Path(directory)
    content = {name: getattr(description, name) for name in ("figures", "samples", "end_of_turn_ids")}
    save_file({"counts": description.counts}, path / "counts.safetensors")
    (path / "rows.json").write_text(json.dumps(content))


def read_description(directory: str | Path) -> Description:
    """The inverse of `write_description`."""
    path = Path(directory)
    return Description(
        **json.loads((path / "rows.json").read_text()),
        counts=load_file(path / "counts.safetensors")["counts"],
    )
