"""Cost per token and peak memory of our trainer from small packs to large ones; rows of 1,024 tokens, half of
them supervised.

Cost: CPU-seconds per data token of any size at most COST_SPREAD times those of the cheapest. Memory: a
straight line through the smaller sizes must foretell the largest one's peak; MEMORY_SLACK more than that
means that memory grows faster than the pack.
"""

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from tests.benchmarks.results import table, write_json
from tests.benchmarks.states import ROW_TOKENS, SMOLLM2, make_rows, write_ours, write_target
from tests.benchmarks.training import ROOT, run_side

TIMED_STEPS = {2048: 8, 4096: 6, 8192: 4, 16384: 2, 32768: 2}
WARMUP = 1
COST_SPREAD = 1.25
MEMORY_SLACK = 0.1


def judge(lines: list[dict[str, float]]) -> dict[str, Any]:
    """Spread of the cost and the foretold memory.

    Args:
        lines: one a size, ascending: pack_tokens, tokens_per_cpu_s, peak_rss bytes.

    Returns:
        cost_spread: dearest over cheapest. bytes_per_token, base_bytes: the line through all sizes but the
            last.
        memory_over_line: the last size's peak over what that line says. missed: a sentence for each missed
            goal.
    """
    speeds = [line["tokens_per_cpu_s"] for line in lines]
    spread = max(speeds) / min(speeds)
    fit = statistics.linear_regression(
        [line["pack_tokens"] for line in lines[:-1]], [line["peak_rss"] for line in lines[:-1]]
    )
    over = lines[-1]["peak_rss"] / (fit.intercept + fit.slope * lines[-1]["pack_tokens"])
    missed = []
    if spread > COST_SPREAD:
        missed.append(f"cost per token differs {spread:.2f}x between pack sizes, the goal is {COST_SPREAD}x")
    if over > 1 + MEMORY_SLACK:
        missed.append(
            f"the largest pack takes {over:.2f}x the memory that a line through the smaller ones foretells"
        )
    return {
        "cost_spread": spread,
        "bytes_per_token": fit.slope,
        "base_bytes": fit.intercept,
        "memory_over_line": over,
        "missed": missed,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "bench")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(TIMED_STEPS), choices=list(TIMED_STEPS))
    arguments = parser.parse_args()
    states, largest = arguments.out / "states" / "packs", max(arguments.sizes)
    write_target(states / "target", SMOLLM2)
    num_rows = (WARMUP + TIMED_STEPS[largest]) * largest // ROW_TOKENS
    write_ours(states, make_rows(num_rows, 0.5, SMOLLM2.vocab), SMOLLM2)
    lines = []
    for size in tqdm(arguments.sizes, desc="pack sizes", unit="run"):
        options = ["--pack-tokens", str(size), "--warmup", str(WARMUP), "--steps", str(TIMED_STEPS[size])]
        lines.append({"pack_tokens": size} | run_side(sys.executable, "ours", states, *options))
    verdict = judge(lines)
    write_json(arguments.out / "packs.json", {"sizes": lines} | verdict)
    cells = [
        [f"{s['pack_tokens']}", f"{s['tokens_per_cpu_s']:.0f}", f"{s['peak_rss'] / 1e9:.2f}"] for s in lines
    ]
    print(table(["pack tokens", "tokens/CPU-s", "peak GB"], cells))
    print(
        f"cost within {verdict['cost_spread']:.2f}x; memory {verdict['base_bytes'] / 1e9:.2f} GB + "
        f"{verdict['bytes_per_token'] / 1e3:.0f} kB a token, "
        f"the largest at {verdict['memory_over_line']:.2f}x of that line"
    )
    print("\n".join(f"MISSED: {sentence}" for sentence in verdict["missed"]) or "all goals met")
    return 1 if verdict["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
