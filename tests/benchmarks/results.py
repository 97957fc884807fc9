"""What the rounds say: medians, ratios, goals, table and JSON file."""

import json
import statistics
from pathlib import Path
from typing import Any

# supervised share: ours over the peer's in data tokens per CPU-second, at least, and in peak resident memory,
# at most
GOALS = {1.0: (1.4, 0.9), 0.5: (3.0, 0.7), 0.2: (6.0, 0.7)}


def summarise(
    supervised: float, ours: list[dict[str, float]], peer: list[dict[str, float]]
) -> dict[str, Any]:
    """One line of training.json: medians over the rounds, their ratios, and the rounds themselves.

    Args:
        supervised: share of supervised tokens.
        ours: results of each round (meter.StepMeter.results).
        peer: the same of the peer.

    Raises:
        ValueError: if the sides trained other numbers of parameters or used other numbers of threads.
    """
    for key in ("trained", "threads"):
        found = {
            side: sorted({results[key] for results in rounds})
            for side, rounds in (("ours", ours), ("peer", peer))
        }
        if found["ours"] != found["peer"] or len(found["ours"]) != 1:
            raise ValueError(
                f"both sides must have the same {key}, got {found}; "
                "align ours.SETTINGS with the peer's defaults"
            )
    line: dict[str, Any] = {"supervised": supervised}
    for key, name in (("tokens_per_cpu_s", "tokens_per_cpu_s"), ("rss", "peak_rss")):
        line[f"{key}_ours"], line[f"{key}_peer"] = (
            statistics.median(r[name] for r in side) for side in (ours, peer)
        )
    return line | {
        "ratio": line["tokens_per_cpu_s_ours"] / line["tokens_per_cpu_s_peer"],
        "rss_ratio": line["rss_ours"] / line["rss_peer"],
        "rounds": {"ours": ours, "peer": peer},
    }


def missed_goals(lines: list[dict[str, Any]]) -> list[str]:
    """A sentence for every goal that a line misses."""
    missed = []
    for line in lines:
        share, (speed, memory) = line["supervised"], GOALS[line["supervised"]]
        if line["ratio"] < speed:
            missed.append(
                f"{share:.0%} supervised: {line['ratio']:.2f}x the peer's tokens per CPU-second, "
                f"the goal is {speed}x"
            )
        if line["rss_ratio"] > memory:
            missed.append(
                f"{share:.0%} supervised: {line['rss_ratio']:.2f}x the peer's peak memory, "
                f"the goal is {memory}x"
            )
    return missed


def table(header: list[str], rows: list[list[str]]) -> str:
    """Right-aligned text columns."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in [header, *rows]
    )


def training_table(lines: list[dict[str, Any]]) -> str:
    """Table of training.json."""
    header = ["supervised", "tokens/CPU-s", "peer", "ratio", "goal", "peak GB", "peer", "ratio", "goal"]
    rows = []
    for line in lines:
        speed, memory = GOALS[line["supervised"]]
        speeds = [
            f"{line['tokens_per_cpu_s_ours']:.0f}",
            f"{line['tokens_per_cpu_s_peer']:.0f}",
            f"{line['ratio']:.2f}",
        ]
        sizes = [f"{line['rss_ours'] / 1e9:.2f}", f"{line['rss_peer'] / 1e9:.2f}", f"{line['rss_ratio']:.2f}"]
        rows.append([f"{line['supervised']:.0%}", *speeds, f">= {speed}", *sizes, f"<= {memory}"])
    return table(header, rows)


def write_json(path: Path, content: Any) -> None:
    """Write `content` as JSON, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(content, indent=1))
    part.replace(path)
