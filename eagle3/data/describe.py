"""Describe the rows of a run by source: statistics, sample rows, and the count of every supervised token.

Rows are streamed, so memory holds one shard. A description is a directory of two files:

    rows.json            figures {source: statistics}, samples, end_of_turn_ids
    counts.safetensors   counts [S, V] int64, one line for each source in the order of `figures`
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3.data.chat import sample_of
from eagle3.data.tally import RowCounts
from eagle3.shards.tokens import TokenRow
from eagle3.vocab import TokenCounter, coverage_by_size

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_SOURCE_SAMPLES = 2


@dataclass(frozen=True)
class Description:
    """The rows of a run by source.

    statistics: {source: {rows, tokens, supervised_tokens, lengths [[tokens at most, rows], …]}}. samples: as
    `sample_of` returns them. counts: [S, V] int64 supervised occurrences in the order of `statistics`.
    """

    statistics: dict[str, dict[str, Any]]
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
    """Count rows in one pass; decode `num_samples` at most, the first of each source, then the second."""
    counters: dict[str, TokenCounter] = {}
    statistics: dict[str, RowCounts] = {}
    first_rows: list[tuple[int, int, TokenRow]] = []  # number in the source, number of the source, row
    for row in rows:
        if row.source not in counters:
            counters[row.source] = TokenCounter(vocab_size)
            statistics[row.source] = RowCounts()
        counts = statistics[row.source]
        if counts.rows < MAX_SOURCE_SAMPLES:
            first_rows.append((counts.rows, list(counters).index(row.source), row))
        counters[row.source].add(row)
        counts.add(row)
    chosen = sorted(first_rows, key=lambda first: first[:2])[:num_samples]
    tensors = [counter.counts for counter in counters.values()]
    return Description(
        statistics={n: {"rows": c.rows} | c.token_statistics() for n, c in statistics.items()},
        samples=[sample_of(tokenizer, row) for _, _, row in sorted(chosen, key=lambda c: (c[1], c[0]))],
        end_of_turn_ids=sorted(end_of_turn_ids),
        counts=torch.stack(tensors) if tensors else torch.zeros(0, vocab_size, dtype=torch.int64),
    )


def measure_coverage(description: Description, t2d: Tensor) -> dict[str, Any]:
    """Measure the share of the supervised tokens that a draft vocabulary covers.

    Args:
        description: at least one of its tokens is supervised.
        t2d: [V] bool, True for the target tokens of the draft vocabulary.

    Returns:
        JSON-ready: size K of the vocabulary, coverage, by_source {name: [covered, supervised]}, by_size [[K,
        coverage], …] for the most frequent K tokens, K a power of two or V.
    """
    inside = description.counts[:, t2d].sum(1).tolist()
    supervised = description.counts.sum(1).tolist()
    pairs = map(list, zip(inside, supervised, strict=True))
    by_size = coverage_by_size(description.total, description.end_of_turn_ids)
    return {
        "size": int(t2d.sum()),
        "coverage": sum(inside) / sum(supervised),
        "by_source": dict(zip(description.statistics, pairs, strict=True)),
        "by_size": [list(point) for point in by_size],
    }


def write_description(directory: str | Path, description: Description) -> None:
    path = Path(directory)
    save_file({"counts": description.counts}, path / "counts.safetensors")
    content = {
        "figures": description.statistics,
        "samples": description.samples,
        "end_of_turn_ids": description.end_of_turn_ids,
    }
    (path / "rows.json").write_text(json.dumps(content))


def read_description(directory: str | Path) -> Description:
    """The inverse of `write_description`."""
    path = Path(directory)
    content = json.loads((path / "rows.json").read_text())
    counts = load_file(path / "counts.safetensors")["counts"]
    return Description(content["figures"], content["samples"], content["end_of_turn_ids"], counts)
