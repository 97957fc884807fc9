"""Engines whose answers a server makes, and what they are asked."""

from pathlib import Path

from eagle3.config.engine import EngineConfig
from eagle3.engine.interface import EngineSettings
from eagle3.engine.progress import Report
from eagle3.engine.server.engine import ServerEngine
from eagle3.regenerate.answers import Answer, Request, Sampling

ENGINE = EngineConfig(dtype="float32", max_model_len=64, max_num_seqs=2)
GREEDY = Sampling(temperature=0.0, top_p=1.0, max_new_tokens=5)
PROMPTS = [[3, i, i + 1][: 1 + i % 3] for i in range(12)]


def server_engine(url: str, target: Path, config: EngineConfig = ENGINE) -> ServerEngine:
    return ServerEngine(EngineSettings.from_dirs(target, config, server_url=url))


def answers_of(
    engine: ServerEngine, prompts: list[list[int]] = PROMPTS, sampling: Sampling = GREEDY
) -> list[Answer]:
    """One answer to each prompt, in order."""
    answers: dict[int, Answer] = {}
    requests = {i: Request(prompt, sampling) for i, prompt in enumerate(prompts)}
    engine.answer(requests, lambda i, answer: answers.update({i: answer}), 0, Report())
    return [answers[i] for i in range(len(prompts))]
