"""Our trainer against speculators' own on the same states: data tokens per CPU-second and peak memory,
alternating.

Three shares of supervised tokens, three rounds each, every run in a process of its own; the sides take turns,
so that a slow minute of the machine meets both. Ends non-zero if a goal is missed. Keep the machine quiet:
threads that wait for a core spin, and their CPU-seconds count.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from tqdm import tqdm

from tests.benchmarks.results import GOALS, missed_goals, summarise, training_table, write_json
from tests.benchmarks.states import write_both

ROOT = Path(__file__).resolve().parents[2]
PACK_TOKENS = 2048
ROWS, PEER_PACKS = 20, 9  # the peer keeps a tenth of the rows for validation: 18 of 20 fill 9 packs


def run_side(python: str, module: str, states: Path, *options: str) -> dict[str, float]:
    """Run one side in its own process and return its results.

    Raises:
        RuntimeError: if it fails; with the end of its output.
    """
    states = states.resolve()
    results = states / f"{module}.json"
    results.unlink(missing_ok=True)
    command = [
        python,
        "-m",
        f"tests.benchmarks.{module}",
        "--states",
        str(states),
        "--results",
        str(results),
        *options,
    ]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode or not results.exists():
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-3000:]}")
    found: dict[str, float] = json.loads(results.read_text())
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer-python", default="runs/bench/peer/bin/python")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "bench")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument(
        "--shares", type=float, nargs="+", default=sorted(GOALS, reverse=True), choices=sorted(GOALS)
    )
    arguments = parser.parse_args()
    options = [
        "--pack-tokens",
        str(PACK_TOKENS),
        "--warmup",
        str(arguments.warmup),
        "--steps",
        str(arguments.steps),
    ]
    num_rows = ROWS * -(-(arguments.warmup + arguments.steps) // PEER_PACKS)
    lines = []
    with tqdm(total=len(arguments.shares) * arguments.rounds * 2, desc="training", unit="run") as bar:
        for share in arguments.shares:
            states = arguments.out / "states" / f"{share:.0%}"
            write_both(states, num_rows, share)
            rounds: dict[str, list[dict[str, float]]] = {"ours": [], "peer": []}
            for _ in range(arguments.rounds):
                for side, python in (("ours", sys.executable), ("peer", arguments.peer_python)):
                    bar.set_postfix_str(f"{side}, {share:.0%} supervised")
                    rounds[side].append(run_side(python, side, states, *options))
                    bar.update()
            lines.append(summarise(share, **rounds))
            write_json(arguments.out / "training.json", lines)
    print(training_table(lines))
    missed = missed_goals(lines)
    print("\n".join(f"MISSED: {sentence}" for sentence in missed) or "all goals met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
