"""The overfit check: a draft learns 20 of the target's own greedy answers by heart and is served by vLLM on
the same prompts.

A sound chain reaches an acceptance length near k + 1; one whose mask, shift or norm is off by a little does
not.

    .venv/bin/python -m tests.benchmarks.overfit --target <target_dir of summary.json, after make smoke>
"""

import argparse
import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

from eagle3.config.engine import EngineConfig, EvaluateConfig, ExtractConfig
from eagle3.config.training import ExportConfig, TrainConfig
from eagle3.data.chat import load_chat_tokenizer
from eagle3.engine.engine import capture, generate
from eagle3.engine.interface import EngineSettings
from eagle3.evaluation.benchmark import evaluate
from eagle3.export import write_export
from eagle3.regenerate.answers import Sampling
from eagle3.shards.tokens import TokenRow, write_token_shard
from eagle3.targets.properties import aux_layer_ids
from eagle3.training.launch import TrainJob, train_in_processes
from eagle3.vocab import build_vocab, count_tokens, save_vocab
from tests.helpers.calls import render_prompt

NUM_CONVERSATIONS, K, SERVED_TOKENS = 20, 3, 48


def overfit(
    target_dir: Path, prompts: list[list[int]], engine: EngineConfig, cfg: TrainConfig, work: Path
) -> dict[str, Any]:
    """Answer, capture, train, export and serve the same prompts.

    The draft learns a little more than is served, since the last round of an answer looks past its end.

    Args:
        prompts: token ids.
        work: an empty directory.

    Returns:
        evaluate's results.
    """
    config = json.loads((target_dir / "config.json").read_text())
    layer_ids = aux_layer_ids([], config["num_hidden_layers"])
    greedy = Sampling(temperature=0.0, top_p=1.0, max_new_tokens=SERVED_TOKENS + 2 * K, ignore_eos=True)
    answers = generate(EngineSettings.from_dirs(target_dir, engine), prompts, greedy).answers
    rows = [TokenRow(str(i), "overfit", p, [False] * len(p)) for i, p in enumerate(prompts)]
    write_token_shard(work / "prompts.parquet", rows)
    answered = [
        TokenRow(
            row.sample_id, row.source, row.token_ids + a.token_ids, row.loss_mask + [True] * len(a.token_ids)
        )
        for row, a in zip(rows, answers, strict=True)
    ]
    write_token_shard(work / "answers.parquet", answered)
    capturing = EngineSettings.from_dirs(target_dir, engine, layer_ids=layer_ids)
    extract = ExtractConfig(encoding="fp32")
    capture(capturing, work / "answers.parquet", work / "states", extract, {})
    counts = count_tokens(answered, config["vocab_size"])
    save_vocab(work / "vocab.safetensors", build_vocab(counts, min(config["vocab_size"], 4096), []))
    job = TrainJob(
        shard_dirs=[str(work / "states")],
        vocab_path=str(work / "vocab.safetensors"),
        target_dir=str(target_dir),
        layer_ids=layer_ids,
        out_dir=str(work / "draft"),
        cfg=cfg,
    )
    train_in_processes(job)
    export = ExportConfig(num_speculative_tokens=K, dtype="float32")
    write_export(
        work / "draft", work / "vocab.safetensors", target_dir, "example-org/overfit", export, work / "export"
    )
    settings = EvaluateConfig(
        num_speculative_tokens=K, max_new_tokens=SERVED_TOKENS, dtype="float32", concurrency=4
    )
    out = str(work / "evaluation.json")
    return evaluate(
        str(target_dir), str(work / "export"), str(work / "prompts.parquet"), engine, settings, out
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", type=Path, required=True, help="target directory")
    parser.add_argument("--epochs", type=int, default=60)
    args = parser.parse_args()
    tokenizer = load_chat_tokenizer(args.target)
    with open("workflows/recipes/prompts.jsonl") as f:
        texts = [json.loads(line)["prompt"] for line in itertools.islice(f, NUM_CONVERSATIONS)]
    prompts = [render_prompt(tokenizer, [{"role": "user", "content": text}]) for text in texts]
    engine = EngineConfig(
        dtype="float32",
        max_model_len=512,
        max_num_seqs=NUM_CONVERSATIONS,
        max_num_batched_tokens=512,
        enforce_eager=True,
    )
    cfg = TrainConfig(
        epochs=args.epochs,
        pack_tokens=512,
        learning_rate=1e-3,
        head="target_frozen",
        fc_norm=True,
        norm_output=True,
        validation_rows=0,
        checkpoint_every=100_000,
    )
    with tempfile.TemporaryDirectory() as work:
        results = overfit(args.target, prompts, engine, cfg, Path(work))
    shown = (
        "acceptance_length",
        "acceptance_by_position",
        "rounds",
        "trainer_rounds",
        "trainer_acceptance_length",
    )
    print(json.dumps({key: results[key] for key in shown}, indent=1))


if __name__ == "__main__":
    main()
