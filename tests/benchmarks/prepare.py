"""Rows a second and memory of the prepare stage: 100,000 rows of ShareGPT's shape, some 500 tokens each, by a real tokenizer.

The rows are made of the shipped prompts' words, written as one JSON list as ShareGPT is. Memory is that of all processes together
(PSS: a page that several share counts once), sampled. With several numbers of workers the shards must be the same.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.benchmarks.results import table, write_json

ROOT = Path(__file__).resolve().parents[2]
GGUF = ROOT / "runs" / "target" / "SmolLM2-135M-Instruct.gguf"
MIN_ROWS_PER_S = 600
MAX_MEMORY_BYTES = 2 << 30
SAMPLE_EVERY_S = 0.5


def write_rows(path: Path, num_rows: int) -> None:
    """Write a JSON list of conversations: two to four exchanges, the answers four times as long as the questions."""
    words = " ".join(
        json.loads(line)["prompt"]
        for line in (ROOT / "workflows/recipes/prompts.jsonl").read_text().splitlines()
    ).split()
    rng = random.Random(0)

    def text(num_words: int) -> str:
        chosen = rng.choices(words, k=num_words)
        return " ".join(word + "\n\n" * (i % 40 == 39) for i, word in enumerate(chosen))

    with open(path, "w") as f:
        for i in range(num_rows):
            turns = []
            num_exchanges = rng.randint(2, 4)
            for _ in range(num_exchanges):
                for role, share in (("human", 0.2), ("gpt", 0.8)):
                    turns.append({"from": role, "value": text(int(share * 380 / num_exchanges))})
            f.write(("[" if i == 0 else ",\n") + json.dumps({"id": f"row-{i}", "conversations": turns}))
        f.write("]\n")


def process_tree(pid: int) -> Iterator[int]:
    """A process and its descendants."""
    yield pid
    try:
        children = [c for f in Path(f"/proc/{pid}/task").glob("*/children") for c in f.read_text().split()]
    except OSError:  # it has just ended
        return
    for child in children:
        yield from process_tree(int(child))


class Sampler(threading.Thread):
    """Peak memory (proportional set size) and CPU seconds of this process and its descendants, sampled while it runs."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak_bytes, self.done = 0, threading.Event()
        self.cpu_s: dict[int, float] = {}

    def run(self) -> None:
        while not self.done.wait(SAMPLE_EVERY_S):
            self.sample()

    def sample(self) -> None:
        total = 0
        for pid in list(process_tree(os.getpid())):
            try:
                rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
                times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
            except OSError:  # it has just ended
                continue
            total += int(rollup.split("Pss:")[1].split()[0]) << 10
            self.cpu_s[pid] = sum(map(int, times)) / os.sysconf("SC_CLK_TCK")
        self.peak_bytes = max(self.peak_bytes, total)


def measure(rows_path: Path, tokenizer_dir: Path, workers: int) -> dict[str, Any]:
    """Prepare once: seconds, CPU seconds of all processes, rows/s, tokens a row, peak bytes, digests of the shards."""
    from eagle3.config.data import DataConfig, SourceConfig
    from eagle3.data.prepare import prepare_shards

    cfg = DataConfig(sources=[SourceConfig(path=str(rows_path), preset="sharegpt")], workers=workers)
    sampler = Sampler()
    sampler.sample()
    cpu_before = sum(sampler.cpu_s.values())
    sampler.start()
    with tempfile.TemporaryDirectory(dir=rows_path.parent) as out:
        heldout = SourceConfig(path=str(ROOT / "workflows/recipes/heldout.jsonl"))
        began = time.monotonic()
        prepared = prepare_shards(heldout, tokenizer_dir, cfg, False, out)
        seconds = time.monotonic() - began
    sampler.done.set()
    sampler.join()
    report = prepared.report
    return {
        "workers": workers,
        "rows": report["rows_read"],
        "kept": report["rows_kept"],
        "seconds": seconds,
        "cpu_s": sum(sampler.cpu_s.values()) - cpu_before,
        "rows_per_s": report["rows_read"] / seconds,
        "tokens_per_row": report["tokens"] / report["rows_kept"],
        "peak_bytes": sampler.peak_bytes,
        "digests": [file.summary.digest for file in prepared.shards],
    }


def write_tokenizer(source: Path, out: Path) -> Path:
    """The directory itself, or the tokenizer that a GGUF file holds."""
    if source.is_dir():
        return source
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(
        source.parent, gguf_file=source.name, local_files_only=True
    ).save_pretrained(out)
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "bench")
    parser.add_argument("--tokenizer", type=Path, default=GGUF, help="target directory or GGUF file")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--workers", type=int, nargs="+", default=[2])
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    tokenizer_dir = write_tokenizer(arguments.tokenizer, arguments.out / "tokenizer")
    rows_path = arguments.out / "sharegpt.json"
    write_rows(rows_path, arguments.rows)
    lines = [measure(rows_path, tokenizer_dir, workers) for workers in arguments.workers]
    missed = [
        f"{line['workers']} workers: other digests"
        for line in lines
        if line["digests"] != lines[0]["digests"]
    ]
    for line in lines:
        if line["rows_per_s"] < MIN_ROWS_PER_S:
            missed.append(
                f"{line['workers']} workers: {line['rows_per_s']:.0f} rows/s, the goal is {MIN_ROWS_PER_S}"
            )
        if line["peak_bytes"] > MAX_MEMORY_BYTES:
            missed.append(f"{line['workers']} workers: {line['peak_bytes'] / 2**30:.2f} GiB, the goal is 2")
    write_json(arguments.out / "prepare.json", {"runs": lines, "missed": missed})
    rows_path.unlink()
    cells = []
    for s in lines:
        figures = [f"{s['rows_per_s']:.0f}", f"{s['rows'] / s['cpu_s']:.0f}", f"{s['tokens_per_row']:.0f}"]
        cells.append([f"{s['workers']}", *figures, f"{s['peak_bytes'] / 2**30:.2f}"])
    print(table(["workers", "rows/s", "rows/CPU-s", "tokens/row", "peak GiB"], cells))
    print("\n".join(f"MISSED: {sentence}" for sentence in missed) or "all goals met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
