"""Jobs that run in the engine process: functions of an engine, a report and pickled arguments."""

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from eagle3.config.engine import ExtractConfig, RegenerateConfig
from eagle3.engine.interface import AnsweringEngine, Engine, Generation
from eagle3.engine.progress import Report
from eagle3.regenerate.answers import Answer, Request, Sampling

if TYPE_CHECKING:
    from torch import Tensor


def generate(
    engine: Engine, report: Report, prompts: list[list[int]], sampling: Sampling, seed: int
) -> Generation:
    requests = {i: Request(prompt, sampling) for i, prompt in enumerate(prompts)}
    answers: dict[int, Answer] = {}
    engine.warm_up(list(requests.values()))
    rounds_before, accepted_before = engine.draft_counts()
    report.start(len(prompts), "answers", lambda: report.conversations)
    start = time.perf_counter()
    engine.answer(requests, lambda i, answer: answers.update({i: answer}), seed, report)
    seconds = time.perf_counter() - start
    rounds, accepted = engine.draft_counts()
    new_accepted = tuple(a - b for a, b in zip(accepted, accepted_before, strict=True))
    return Generation([answers[i] for i in requests], seconds, rounds - rounds_before, new_accepted)


def regenerate(
    engine: AnsweringEngine,
    report: Report,
    token_shard_path: str,
    out: str,
    log_uri: str,
    cfg: RegenerateConfig,
) -> dict[str, Any]:
    """See engine.regenerate."""
    from eagle3.regenerate.answer_log import AnswerLog
    from eagle3.regenerate.generator import AnswerGenerator
    from eagle3.shards.tokens import read_token_shard, summarise_rows, write_token_shard

    settings = engine.settings
    with AnswerLog(log_uri) as log:
        rows = read_token_shard(token_shard_path)
        generator = AnswerGenerator(rows, settings.target_dir, cfg, settings.engine.max_model_len, log)
        requests = generator.start()
        report.start(generator.num_turns, "user turns", lambda: generator.num_turns_done)
        if requests:
            engine.answer(requests, generator.follow, cfg.seed, report)
    answered, counts = generator.result()
    summary = write_token_shard(out, answered) if answered else summarise_rows([])
    return {**asdict(summary), "counts": counts}


def capture(
    engine: Engine,
    report: Report,
    token_shard_path: str,
    out: str,
    extract: ExtractConfig,
    info: dict[str, Any],
) -> tuple[dict[str, Any], int]:
    """Return the manifest and the number of tokens found in the prefix cache; see engine.capture."""
    from eagle3.engine.capture import CAPTURE_VERSION, ShardSink
    from eagle3.shards.tokens import read_token_shard

    rows = read_token_shard(token_shard_path)
    layer_ids = list(engine.settings.layer_ids or ())
    info = {**info, **engine.describe(), "layer_ids": layer_ids, "capture_version": CAPTURE_VERSION}
    target_dir = engine.settings.target_dir
    sink = ShardSink(rows, out, len(layer_ids), extract, info, target_dir, engine.settings.engine.dtype)
    wanted_rows = [rows[i] for i in sink.wanted]
    total = sum(len(row.token_ids) for row in rows)
    kept = total - sum(len(row.token_ids) for row in wanted_rows)
    report.start(total, "tokens", lambda: kept + report.tokens)

    def add_row(i: int, states: "Tensor", next_token: int) -> None:
        sink.add(sink.wanted[i], states, next_token)
        report.add(len(wanted_rows[i].token_ids), 1)
        report.send_if_due()

    try:
        cached_tokens = engine.capture(wanted_rows, add_row)
        return sink.close(), cached_tokens
    finally:
        sink.writer.stop()
