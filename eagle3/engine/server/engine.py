"""A vLLM server that the user runs, as an engine: it answers prompts; it captures nothing and serves no draft of ours.

Requests carry no seed, since a CPU build of vLLM ends at the first seeded request. At temperature 0 answers repeat as far as the
server's arithmetic does, which depends on the rows that it batches; above that they differ from run to run.
"""

import asyncio
import json
import logging
import re
import time
import uuid
from collections import Counter
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

from eagle3.engine.progress import Report
from eagle3.engine.server.client import Completion, ServedModel, ServerClient
from eagle3.regenerate.answers import Answer, Follow, Request, Sampling
from eagle3.targets.properties import end_of_turn_ids

logger = logging.getLogger(__name__)

# A server that runs answers at once: four attempts in four seconds.
START_ATTEMPTS = 4
# What a request leaves open, the server fills from the target's generation_config.json; an engine of ours does not.
NEUTRAL = {
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
DRAFT_COUNTER = re.compile(
    r"^vllm:spec_decode_num_(drafts|accepted_tokens|accepted_tokens_per_pos)_total\{(.*)\} (\S+)$",
    re.MULTILINE,
)


class ServerEngine:
    """Answers over HTTP. `settings` as eagle3.engine.engine sends them, with `server_url`.

    Raises:
        ValueError: if the server does not serve exactly one model, or serves fewer tokens than `engine.max_model_len`.
        RuntimeError: if it does not answer.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.target_dir: str = settings["target_dir"]
        self.config: dict[str, Any] = settings["engine"]
        self.dtype: str = self.config["dtype"]
        self.url: str = settings["server_url"]
        self.model = json.loads((Path(self.target_dir) / "config.json").read_text())
        self.max_in_flight = 2 * int(self.config["max_num_seqs"])
        if settings["draft_dir"] is not None:
            raise ValueError(
                f"the server at {self.url} cannot load a draft for one call; leave its URL out to evaluate drafts"
            )
        self.version, self.served = asyncio.run(self._introduction())

    async def _introduction(self) -> tuple[str, ServedModel]:
        async with ServerClient(self.url, max_attempts=START_ATTEMPTS) as client:
            version, models = await client.version(), await client.models()
        if len(models) != 1:
            raise ValueError(
                f"the server at {self.url} must serve exactly one model, got {[m.id for m in models]}; start one with the target "
                "alone, without adapters"
            )
        needed = self.config["max_model_len"]
        if (models[0].max_model_len or 0) < needed:
            raise ValueError(
                f"the server at {self.url} must take {needed} tokens, it takes {models[0].max_model_len}; start it with "
                f"--max-model-len {needed}, or lower engine.max_model_len"
            )
        return version, models[0]

    def describe(self) -> dict[str, Any]:
        """What the server says of itself and what is known of the target, for the manifest; its model's name may be a path."""
        return {
            "engine": "vllm server",
            "engine_version": f"vllm {self.version}",
            "dtype": self.dtype,
            "last_layer_id": self.model["num_hidden_layers"],
            "server_max_model_len": self.served.max_model_len,
        }

    def generate(
        self, prompts: list[list[int]], sampling: Sampling, seed: int, report: Report
    ) -> dict[str, Any]:
        """Answer every prompt; a Generation as a dict. Its draft counts are the server's, other clients' requests included."""
        answers: dict[int, Answer] = {}
        requests = {i: Request(prompt, sampling) for i, prompt in enumerate(prompts)}
        seconds, counts = self._answer(requests, lambda i, a: answers.update({i: a}), seed, report)
        return {
            "answers": [asdict(answers[i]) for i in range(len(prompts))],
            "seconds": seconds,
            "generated_tokens": sum(len(a.token_ids) for a in answers.values()),
            "num_drafts": counts["drafts"],
            "num_accepted_tokens": counts["accepted_tokens"],
            "accepted_per_position": [counts[k] for k in sorted(k for k in counts if isinstance(k, int))],
        }

    def play(self, requests: dict[int, Request], follow: Follow, seed: int, report: Report) -> None:
        """Answer every conversation's request, and what follows on the answer, until nothing does."""
        self._answer(requests, follow, seed, report)

    def _answer(
        self, requests: dict[int, Request], follow: Follow, seed: int, report: Report
    ) -> tuple[float, Counter[str | int]]:
        """Seconds that it took, and the server's draft counts meanwhile."""
        if any(request.sampling.temperature > 0 for request in requests.values()):
            logger.warning(
                "seed %d is not used: a server samples with its own, so these answers differ from run to run",
                seed,
            )
        return asyncio.run(self._answer_all(requests, follow, report))

    async def _answer_all(
        self, requests: dict[int, Request], follow: Follow, report: Report
    ) -> tuple[float, Counter[str | int]]:
        slots = asyncio.Semaphore(self.max_in_flight)
        call_id = uuid.uuid4().hex
        numbers = count()
        async with ServerClient(self.url, self.max_in_flight) as client:

            async def converse(i: int) -> None:
                async with slots:
                    request: Request | None = requests[i]
                    while request:
                        completion = await self._complete(
                            client, request, f"eagle3-{call_id}-{next(numbers)}"
                        )
                        request = follow(i, Answer(completion.token_ids, completion.finish_reason))
                        report.add(len(completion.token_ids), request is None)
                        report.tell()

            before = draft_counts(await client.metrics())
            start = time.perf_counter()
            try:
                async with asyncio.TaskGroup() as group:
                    for i in requests:
                        group.create_task(converse(i))
            except ExceptionGroup as failures:  # the first one cancelled the other requests
                raise failures.exceptions[0] from None
            seconds = time.perf_counter() - start
            counts = draft_counts(await client.metrics())
        counts.subtract(before)
        return seconds, counts

    async def _complete(self, client: ServerClient, request: Request, request_id: str) -> Completion:
        sampling = request.sampling
        # An engine of ours ends answers at engine.max_model_len; a server refuses a request that may exceed its own limit.
        wanted = min(sampling.max_new_tokens, self.config["max_model_len"] - len(request.prompt))
        fields = NEUTRAL | {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "ignore_eos": sampling.ignore_eos,
            "stop_token_ids": [] if sampling.ignore_eos else end_of_turn_ids(self.target_dir),
        }
        completion = await client.complete(self.served.id, request.prompt, wanted, request_id, **fields)
        if completion.finish_reason == "length" and len(completion.token_ids) != wanted:
            raise RuntimeError(
                f"{wanted} tokens were asked for, the server at {self.url} stopped after {len(completion.token_ids)}; "
                "its own limit is lower, start it with --generation-config vllm"
            )
        return completion


def draft_counts(metrics: str) -> Counter[str | int]:
    """Speculative rounds as `drafts` and `accepted_tokens`, the latter by draft position 0 … k - 1 too, from Prometheus text."""
    counts: Counter[str | int] = Counter()
    for name, labels, value in DRAFT_COUNTER.findall(metrics):
        position = re.search(r'position="(\d+)"', labels)
        counts[int(position.group(1)) if position else name] += int(float(value))
    return counts
