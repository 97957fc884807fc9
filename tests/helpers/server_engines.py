"""Engines whose answers a server makes, and what they are asked."""

from pathlib import Path
from typing import Any

from eagle3.config.engine import EngineConfig
from eagle3.engine.progress import Report
from eagle3.engine.server.engine import ServerEngine
from eagle3.regenerate.answers import Sampling
from tests.helpers.vllm_server import StandIn

ENGINE = EngineConfig(dtype="float32", max_model_len=64, max_num_seqs=2)
GREEDY = Sampling(temperature=0.0, top_p=1.0, max_new_tokens=5)
PROMPTS = [[3, i, i + 1][: 1 + i % 3] for i in range(12)]


def server_engine(
    url: str, target: Path, config: EngineConfig = ENGINE, draft_dir: str | None = None
) -> ServerEngine:
    settings = {
        "target_dir": str(target),
        "layer_ids": None,
        "draft_dir": draft_dir,
        "num_speculative_tokens": 0,
        "engine": config.model_dump(),
        "server_url": url,
    }
    return ServerEngine(settings)


def answer(
    server: StandIn, target: Path, prompts: list[list[int]] = PROMPTS, sampling: Sampling = GREEDY
) -> dict[str, Any]:
    """What a new engine makes of the prompts."""
    return server_engine(server.url, target).generate(prompts, sampling, 0, Report())
