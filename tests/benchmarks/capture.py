"""Speed of capture against the same engine doing plain prefill, and against transformers: tokens per second, alternating.

Every side has an engine process of its own, as eagle3.engine starts them; all are alive at once and idle while another works, so
that a slow minute of the machine meets all of them. A round is one shard of a recipe's answered prompts on every side, prefix
caches emptied first: prefill of each row and one generated token. Capture counts from the token shard to the manifest of the
hidden-state shard. Ends non-zero if a goal is missed.
"""

import shutil
import statistics
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from eagle3.config.engine import EngineConfig, ExtractConfig
from eagle3.engine import jobs
from eagle3.engine.interface import EngineSettings
from eagle3.engine.process import EngineProcess, Job
from eagle3.engine.progress import Report
from eagle3.regenerate.answers import Sampling
from eagle3.shards.tokens import read_token_shard, write_token_shard
from eagle3.targets.properties import aux_layer_ids
from eagle3.targets.weights import check_target_dir
from tests.benchmarks.answers import Answers, make_answers, read_arguments
from tests.benchmarks.meter import tree_cpu_s
from tests.benchmarks.results import table, write_json

PLAIN, TRANSFORMERS = "plain prefill", "transformers"
CAPTURES: dict[str, tuple[Any, Any]] = {
    "capture bf16 zstd": ("bf16", "zstd"),
    "capture fp32": ("fp32", "none"),
}
# Of every capture: wall tokens per second over the other side's, at least.
GOALS = {PLAIN: 0.93, TRANSFORMERS: 1.2}
WARM_UP_ROWS = 8
ONE_TOKEN = Sampling(temperature=0.0, top_p=1.0, max_new_tokens=1, ignore_eos=True)
Figures = dict[str, float]


def summarise(rounds: dict[str, list[Figures]]) -> dict[str, Any]:
    """Medians of every side, and every capture's ratios to the others.

    Args:
        rounds: of each side its figures, round by round; the n-th of all sides were measured one after the other.

    Returns:
        sides: {name: {tokens_per_s, tokens_per_cpu_s}}, medians. ratios: {capture: {other: the same two}}, medians of the ratios
        within a round: neighbours in time meet the same machine. rounds: as given.
    """
    figures = ("tokens_per_s", "tokens_per_cpu_s")
    sides = {
        side: {f: statistics.median(r[f] for r in found) for f in figures} for side, found in rounds.items()
    }
    ratios = {
        capture: {
            other: {
                f: statistics.median(a[f] / b[f] for a, b in zip(rounds[capture], rounds[other], strict=True))
                for f in figures
            }
            for other in GOALS
        }
        for capture in CAPTURES
    }
    return {"sides": sides, "ratios": ratios, "rounds": rounds}


def missed_goals(summary: dict[str, Any]) -> list[str]:
    """A sentence for every capture that is too slow."""
    return [
        f"{capture}: {found['tokens_per_s']:.2f}x the tokens per second of {other}, the goal is {GOALS[other]}x"
        for capture, others in summary["ratios"].items()
        for other, found in others.items()
        if found["tokens_per_s"] < GOALS[other]
    ]


def speed_table(summary: dict[str, Any]) -> str:
    """Table of capture.json: each side's medians, and for captures the ratios to the others."""
    header = ["side", "tokens/s", "tokens/CPU-s"]
    header += [f"/ {other}{unit}" for other in GOALS for unit in (f" (>= {GOALS[other]})", " by CPU")]
    rows = []
    for side, median in summary["sides"].items():
        cells = [side, f"{median['tokens_per_s']:.0f}", f"{median['tokens_per_cpu_s']:.0f}"]
        for other in GOALS:
            found = summary["ratios"].get(side, {}).get(other)
            cells += [f"{found[f]:.3f}" for f in ("tokens_per_s", "tokens_per_cpu_s")] if found else ["", ""]
        rows.append(cells)
    return table(header, rows)


def empty_cache(engine: Any, report: Report) -> None:
    """Forget the prefixes of earlier rounds, so that the next job computes all; the reference keeps none."""
    if not hasattr(engine, "llm"):
        return
    engine.engine.step()  # the last captured rows give their blocks back one step later
    if not engine.llm.reset_prefix_cache():
        raise RuntimeError("the prefix cache cannot be emptied while requests hold blocks of it")


@dataclass
class Side:
    """One engine, ready in its process, and how its states are stored; None: plain prefill stores none."""

    process: EngineProcess
    extract: ExtractConfig | None

    def measure(self, path: Path, out: Path) -> Figures:
        """Send one shard through the engine, its states, if there are any, to `out`.

        Returns:
            tokens_per_s, tokens_per_cpu_s (user and system, all threads), tokens, seconds, cpu_s.
        """
        rows = read_token_shard(path)
        tokens = sum(len(row.token_ids) for row in rows)
        job: Job = partial(jobs.generate, prompts=[row.token_ids for row in rows], sampling=ONE_TOKEN, seed=0)
        if self.extract is not None:
            shutil.rmtree(out, ignore_errors=True)
            paths = {"token_shard_path": str(path.resolve()), "out": str(out.resolve())}
            job = partial(jobs.capture, **paths, extract=self.extract, info={})
        self.process.run(empty_cache)
        pid = self.process.process.pid
        assert pid is not None
        cpu_s, start = tree_cpu_s(pid), time.perf_counter()
        self.process.run(job)
        seconds, cpu_s = time.perf_counter() - start, tree_cpu_s(pid) - cpu_s
        return {
            "tokens_per_s": tokens / seconds,
            "tokens_per_cpu_s": tokens / cpu_s,
            "tokens": tokens,
            "seconds": seconds,
            "cpu_s": cpu_s,
        }


def start_sides(answers: Answers) -> dict[str, Side]:
    """Start all engines, with the same settings; both captures share one."""
    config = check_target_dir(answers.target_dir)
    layer_ids = aux_layer_ids([], config["num_hidden_layers"])
    reference = answers.engine.model_copy(update={"engine": "transformers"})

    def started(engine: EngineConfig, layers: list[int] | None) -> EngineProcess:
        return EngineProcess(EngineSettings.from_dirs(answers.target_dir, engine, layer_ids=layers))

    first, second = (
        ExtractConfig(encoding=encoding, compression=compression)
        for encoding, compression in CAPTURES.values()
    )
    capturing = started(answers.engine, layer_ids)
    first_name, second_name = CAPTURES
    return {
        PLAIN: Side(started(answers.engine, None), None),
        first_name: Side(capturing, first),
        second_name: Side(capturing, second),
        TRANSFORMERS: Side(started(reference, layer_ids), first),
    }


def run_rounds(sides: dict[str, Side], shard: Path, num_rounds: int, out: Path) -> dict[str, list[Figures]]:
    """Warm all sides up, then measure them in turns, every second round in the opposite order."""
    write_token_shard(out / "warm-up.parquet", read_token_shard(shard)[:WARM_UP_ROWS])
    for side in sides.values():
        side.measure(out / "warm-up.parquet", out / "states")
    rounds: dict[str, list[Figures]] = {name: [] for name in sides}
    with tqdm(total=num_rounds * len(sides), desc="capture", unit="run") as bar:
        for number in range(num_rounds):
            for name in list(sides)[:: -1 if number % 2 else 1]:
                bar.set_postfix_str(name)
                rounds[name].append(sides[name].measure(shard, out / "states"))
                bar.update()
    return rounds


def main() -> int:
    parser = read_arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    answers = make_answers(arguments)
    out = arguments.out / "capture"
    out.mkdir(parents=True, exist_ok=True)
    sides = start_sides(answers)
    try:
        rounds = run_rounds(sides, answers.shards[0], arguments.rounds, out)
    finally:
        for side in sides.values():
            side.process.end()
        shutil.rmtree(out)
    summary = summarise(rounds)
    write_json(arguments.out / "capture.json", summary)
    print(speed_table(summary))
    missed = missed_goals(summary)
    print("\n".join(f"MISSED: {sentence}" for sentence in missed) or "all goals met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
