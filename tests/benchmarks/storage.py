"""What the encodings of hidden states cost in bytes, and what training from them costs in acceptance.

A recipe's answered prompts are captured once, in float32 without compression; the other encodings are written from that. Bytes
per token: of whole shards, ids and masks included, beside four states a token as plain bfloat16. Training: the recipe's settings
for a few epochs on all shards but the last, from every encoding with one seed, and from float32 with another, whose distance says
what chance does. Drafts are judged on the last shard, on its exact states, as serving meets them, by the walk over its answers.
Ends non-zero if a goal is missed.
"""

import json
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from eagle3.config.data import VocabConfig
from eagle3.config.engine import ExtractConfig
from eagle3.config.training import ExportConfig, TrainConfig
from eagle3.draft.acceptance import AcceptanceCounts, find_hits, guess, walk_batch
from eagle3.draft.batch import pack_rows
from eagle3.draft.model import load_exported
from eagle3.engine.engine import capture, stop
from eagle3.engine.interface import EngineSettings
from eagle3.export import write_export
from eagle3.shards.hidden_states import read_hidden_states, read_manifest
from eagle3.shards.tokens import read_token_shard
from eagle3.shards.writer import HiddenStateWriter
from eagle3.targets.properties import aux_layer_ids, end_of_turn_ids
from eagle3.targets.weights import check_target_dir, load_target_tensors
from eagle3.training.launch import TrainJob, train_in_processes
from eagle3.vocab import build_vocab, count_tokens, save_vocab
from tests.benchmarks.answers import Answers, make_answers, read_arguments
from tests.benchmarks.results import table, write_json

ENCODINGS, COMPRESSIONS = ("bf16", "fp8"), ("none", "zstd")
# Bytes per token over raw bfloat16, at most.
SIZE_GOALS = {("bf16", "zstd"): 0.70, ("fp8", "zstd"): 0.42}
EXACT, MAX_CHANGE = "fp32", 0.03
RUNS = [("fp32", 0), ("fp32", 1), ("bf16", 0), ("fp8", 0)]


def summarise_bytes(
    manifests: dict[tuple[str, str], list[dict[str, Any]]], num_states: int, hidden_size: int
) -> list[dict[str, Any]]:
    """One line for each way of storing: encoding, compression, bytes_per_token, share of raw bfloat16.

    Args:
        manifests: of all shards, by encoding and compression.
        num_states: states of a token, the last one counted.
    """
    raw = num_states * hidden_size * 2
    lines = [{"encoding": "raw bf16", "compression": "none", "bytes_per_token": float(raw), "share": 1.0}]
    for (encoding, compression), shards in manifests.items():
        found = sum(m["bytes"] for m in shards) / sum(m["tokens"] for m in shards)
        lines.append(
            {"encoding": encoding, "compression": compression, "bytes_per_token": found, "share": found / raw}
        )
    return lines


def missed_goals(sizes: list[dict[str, Any]], drafts: list[dict[str, Any]]) -> list[str]:
    """A sentence for every way of storing that is too large, or too far from exact states in acceptance.

    Args:
        sizes: from summarise_bytes.
        drafts: encoding, seed, acceptance_length.
    """
    missed = []
    for line in sizes:
        goal = SIZE_GOALS.get((line["encoding"], line["compression"]))
        if goal is not None and line["share"] > goal:
            missed.append(
                f"{line['encoding']} with {line['compression']}: {line['share']:.3f}x raw bytes, the goal is {goal}x"
            )
    for draft in drafts:
        change = draft["acceptance_length"] - exact_length(drafts)
        if draft["encoding"] != EXACT and abs(change) > MAX_CHANGE:
            missed.append(
                f"trained from {draft['encoding']}: acceptance length {change:+.3f}, the goal is {MAX_CHANGE} at most"
            )
    return missed


def exact_length(drafts: list[dict[str, Any]]) -> float:
    """Acceptance length of the first draft from exact states, with whose seed those from other encodings were trained."""
    return next(float(draft["acceptance_length"]) for draft in drafts if draft["encoding"] == EXACT)


def storage_tables(sizes: list[dict[str, Any]], drafts: list[dict[str, Any]]) -> str:
    """Both tables of storage.json."""
    rows = []
    for line in sizes:
        goal = SIZE_GOALS.get((line["encoding"], line["compression"]))
        cells = [
            line["encoding"],
            line["compression"],
            f"{line['bytes_per_token']:.0f}",
            f"{line['share']:.3f}",
        ]
        rows.append([*cells, f"<= {goal:.2f}" if goal else ""])
    judged = [
        [
            d["encoding"],
            f"{d['seed']}",
            f"{d['acceptance_length']:.3f}",
            f"{d['acceptance_length'] - exact_length(drafts):+.3f}",
            f"{d['rounds']}",
            f"{d['accepted']}",
        ]
        for d in drafts
    ]
    header = [
        "trained from",
        "seed",
        "acceptance length",
        f"against {EXACT}, seed {RUNS[0][1]}",
        "rounds",
        "accepted",
    ]
    return (
        table(["encoding", "compression", "bytes/token", "of raw", "goal"], rows)
        + "\n\n"
        + table(header, judged)
    )


def capture_exact(answers: Answers, layer_ids: list[int], out: Path) -> list[Path]:
    """Capture all shards in float32, without compression."""
    shards = [out / path.stem for path in answers.shards]
    settings = EngineSettings.from_dirs(answers.target_dir, answers.engine, layer_ids=layer_ids)
    for path, shard in zip(answers.shards, shards, strict=True):
        extract = ExtractConfig(encoding="fp32", compression="none")
        capture(settings, path, shard, extract, {})
    stop()
    return shards


def encode_again(shard: Path, token_shard: Path, cfg: ExtractConfig, out: Path) -> dict[str, Any]:
    """Write a captured shard once more under another encoding; returns its manifest."""
    rows, manifest = read_token_shard(token_shard), read_manifest(shard)
    writer: HiddenStateWriter | None = None
    for number, row in enumerate(read_hidden_states(shard)):
        num_aux, hidden_size = row.aux.shape[1:]
        writer = writer or HiddenStateWriter(out, rows, num_aux, hidden_size, cfg, manifest["info"])
        states = row.aux.new_zeros(len(row.token_ids), num_aux + 1, hidden_size)
        states[:, :-1], states[row.last_positions, -1] = row.aux, row.last
        writer.add(number, states)
    assert writer is not None
    return writer.close()


def train_draft(answers: Answers, shards: list[Path], vocab_path: Path, out: Path, **settings: Any) -> Path:
    """Train under the recipe's settings and these, no rows held out of the shards, and export; returns the export's directory."""
    settings = answers.recipe.get("train", {}) | {"validation_rows": 0, "keep": "last"} | settings
    job = TrainJob(
        shard_dirs=[str(shard) for shard in shards],
        vocab_path=str(vocab_path),
        target_dir=str(answers.target_dir),
        layer_ids=read_manifest(shards[0])["info"]["layer_ids"],
        out_dir=str(out),
        cfg=TrainConfig(**settings),
    )
    train_in_processes(job)
    write_export(
        out,
        vocab_path,
        answers.target_dir,
        "example-org/bench",
        ExportConfig(dtype="float32"),
        out / "export",
    )
    return out / "export"


def judge(export_dir: Path, target_dir: Path, shard: Path, num_steps: int) -> AcceptanceCounts:
    """Walk the answers of a shard with a draft, k = num_steps."""
    draft, target_ids = load_exported(export_dir, load_target_tensors(target_dir).embedding)
    counts = AcceptanceCounts.empty(num_steps)
    for row in read_hidden_states(shard):
        batch = pack_rows([row], num_steps)
        with torch.no_grad():
            hits = find_hits(guess(draft(batch), draft.lm_head.weight, target_ids), batch)
        counts += walk_batch(hits, batch)
    return counts


def measure_bytes(exact: list[Path], answers: Answers, work: Path) -> list[dict[str, Any]]:
    """Write every encoding, with and without compression; what is trained on stays as {encoding}-zstd."""
    manifests: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for encoding in ENCODINGS:
        for compression in COMPRESSIONS:
            cfg, out = (
                ExtractConfig(encoding=encoding, compression=compression),
                work / f"{encoding}-{compression}",
            )
            pairs = zip(exact, answers.shards, strict=True)
            manifests[encoding, compression] = [
                encode_again(shard, tokens, cfg, out / shard.name) for shard, tokens in pairs
            ]
    config = json.loads((answers.target_dir / "config.json").read_text())
    num_states = len(manifests[ENCODINGS[0], "none"][0]["info"]["layer_ids"]) + 1
    return summarise_bytes(manifests, num_states, config["hidden_size"])


def compare_drafts(exact: list[Path], answers: Answers, epochs: int, work: Path) -> list[dict[str, Any]]:
    """Train and judge a draft for each of RUNS, one on each core: cheaper than one after the other on all cores."""
    vocab_size = check_target_dir(answers.target_dir)["vocab_size"]
    counts = count_tokens((row for path in answers.shards[:-1] for row in read_token_shard(path)), vocab_size)
    size = VocabConfig(**answers.recipe.get("vocab", {})).size
    save_vocab(work / "vocab.safetensors", build_vocab(counts, size, end_of_turn_ids(answers.target_dir)))

    def train(run: tuple[str, int]) -> Path:
        encoding, seed = run
        shards = exact if encoding == EXACT else [work / f"{encoding}-zstd" / shard.name for shard in exact]
        out = work / f"draft-{encoding}-{seed}"
        return train_draft(answers, shards[:-1], work / "vocab.safetensors", out, seed=seed, epochs=epochs)

    os.environ["OMP_NUM_THREADS"] = "1"
    with ThreadPoolExecutor(min(len(RUNS), os.cpu_count() or 1)) as pool:
        exports = list(tqdm(pool.map(train, RUNS), total=len(RUNS), desc="training", unit="run"))
    drafts = []
    for (encoding, seed), export_dir in zip(RUNS, exports, strict=True):
        found = judge(
            export_dir,
            answers.target_dir,
            exact[-1],
            TrainConfig(**answers.recipe.get("train", {})).ttt_steps,
        )
        drafts.append(
            {
                "encoding": encoding,
                "seed": seed,
                "acceptance_length": found.acceptance_length,
                "acceptance_by_position": found.by_position,
                "rounds": found.rounds,
                "accepted": found.accepted,
            }
        )
    return drafts


def main() -> int:
    parser = read_arguments(__doc__)
    parser.add_argument("--epochs", type=int, default=3, help="of every training")
    arguments = parser.parse_args()
    answers = make_answers(arguments)
    work = arguments.out / "storage"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    layer_ids = aux_layer_ids([], check_target_dir(answers.target_dir)["num_hidden_layers"])
    exact = capture_exact(answers, layer_ids, work / "fp32-none")
    sizes = measure_bytes(exact, answers, work)
    drafts = compare_drafts(exact, answers, arguments.epochs, work)
    shutil.rmtree(work)
    missed = missed_goals(sizes, drafts)
    write_json(arguments.out / "storage.json", {"sizes": sizes, "drafts": drafts, "missed": missed})
    print(storage_tables(sizes, drafts))
    print("\n".join(f"MISSED: {sentence}" for sentence in missed) or "all goals met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
