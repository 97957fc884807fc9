"""A running vLLM server of the user's as an engine: generates answers, or captures the hidden states that it writes to files.

Requests carry no seed, since a CPU build ends with the first seeded request. At temperature 0 answers repeat as far as the
server's arithmetic does, which depends on the rows it happens to batch; above that they differ from run to run.
"""

import asyncio
import json
import logging
import re
import time
import uuid
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from eagle3.config.engine import EngineConfig
from eagle3.engine.capture import IN_FLIGHT_BYTES, Add
from eagle3.engine.progress import Report
from eagle3.engine.server.client import KEY_VARIABLE, Completion, ServedModel, ServerClient
from eagle3.engine.server.concurrency import run_bounded
from eagle3.engine.server.state_files import RowStates, captured_ids, remove, serve_line, sweep, take, written
from eagle3.regenerate.answers import Answer, Follow, Request, Sampling
from eagle3.shards.tokens import TokenRow
from eagle3.targets.properties import DTYPE_BYTES, end_of_turn_ids

logger = logging.getLogger(__name__)

# A server that is there answers at once: four attempts in four seconds.
START_ATTEMPTS = 4
# After a failure the server notices that nobody waits for the other requests, and writes the states of those it had begun.
ABORT_S = 1.0
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
    """The same two jobs as VllmEngine, by HTTP. `settings` as eagle3.engine.engine sends them, with `server_url`.

    Raises:
        ValueError: if the server does not serve exactly one model or has no room for `engine.max_model_len`.
        RuntimeError: if it does not answer.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.target_dir: str = settings["target_dir"]
        self.layer_ids: list[int] | None = settings["layer_ids"]
        self.config: dict[str, Any] = settings["engine"]
        self.dtype: str = self.config["dtype"]
        self.url: str = settings["server_url"]
        self.model = json.loads((Path(self.target_dir) / "config.json").read_text())
        self.max_in_flight = 2 * int(self.config["max_num_seqs"])
        self.captured = captured_ids(self.layer_ids or [], self.target_dir)
        self.warned_of_layers = False
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
        needed = self.config["max_model_len"] + (self.layer_ids is not None)
        if (models[0].max_model_len or 0) < needed:
            raise ValueError(
                f"the server at {self.url} must take {needed} tokens, it takes {models[0].max_model_len}; start it with "
                f"--max-model-len {needed}, or lower engine.max_model_len (capturing needs one token more than that)"
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
        counts: Counter[str | int] = Counter()
        numbers = count()
        async with _Session(self.url, self.max_in_flight) as session:
            counts.subtract(draft_counts(await session.client.metrics()))
            start = time.perf_counter()

            async def converse(i: int) -> None:
                request: Request | None = requests[i]
                while request:
                    # An engine of ours ends answers at engine.max_model_len, a server refuses what may grow beyond its own.
                    wanted = min(
                        request.sampling.max_new_tokens, self.config["max_model_len"] - len(request.prompt)
                    )
                    sampling = self._fields(request.sampling)
                    completion = await session.complete(
                        self.served.id, request.prompt, wanted, next(numbers), sampling
                    )
                    await self._discard_states(completion)
                    request = follow(i, Answer(completion.token_ids, completion.finish_reason))
                    report.add(len(completion.token_ids), request is None)
                    report.tell()

            await run_bounded(requests, converse, self.max_in_flight)
            seconds = time.perf_counter() - start
            counts.update(draft_counts(await session.client.metrics()))
            if session.directories:  # a server that captures counts drafts that nobody made
                counts.clear()
        return seconds, counts

    def _fields(self, sampling: Sampling) -> dict[str, Any]:
        return {
            **NEUTRAL,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "ignore_eos": sampling.ignore_eos,
            "stop_token_ids": [] if sampling.ignore_eos else end_of_turn_ids(self.target_dir),
        }

    async def _discard_states(self, completion: Completion) -> None:
        """One server may capture and generate: then it writes the states of these prompts too, which nobody wants."""
        path = completion.hidden_states_path
        if path is not None:
            lock = await self._lock(path, lambda: "or take one without --kv-transfer-config for answers")
            lock.close()
            remove(path)

    def capture(self, rows: list[TokenRow], layer_ids: list[int], add: Add) -> int:
        """Hand every row's states to `add`, from one other thread; returns the tokens that the server found in its cache.

        Raises:
            ValueError: if the server does not write the states of these layers to files that can be read here.
            RuntimeError: if it fails, or a file holds something else than was asked for.
        """
        assert layer_ids == self.layer_ids
        return asyncio.run(self._capture(rows, add))

    async def _capture(self, rows: list[TokenRow], add: Add) -> int:
        sampling = {**NEUTRAL, "temperature": 0.0, "ignore_eos": True}
        bytes_per_token = len(self.captured) * self.model["hidden_size"] * DTYPE_BYTES[self.dtype]
        cached_tokens = 0
        loop = asyncio.get_running_loop()
        async with _Session(self.url, self.max_in_flight) as session:
            with ThreadPoolExecutor(1, "hidden-states-reader") as reader:

                async def capture_row(i: int) -> None:
                    nonlocal cached_tokens
                    completion = await session.complete(self.served.id, rows[i].token_ids, 1, i, sampling)
                    if completion.hidden_states_path is None:
                        raise ValueError(
                            f"the server at {self.url} writes no hidden states; {self._how_to_serve()}"
                        )
                    lock = await self._lock(completion.hidden_states_path, self._how_to_serve)
                    await loop.run_in_executor(reader, self._hand_on, i, rows[i], completion, lock, add)
                    cached_tokens += completion.cached_tokens

                await run_bounded(
                    range(len(rows)),
                    capture_row,
                    self.max_in_flight,
                    lambda i: len(rows[i].token_ids) * bytes_per_token,
                    IN_FLIGHT_BYTES,
                )
        return cached_tokens

    async def _lock(self, path: str, remedy: Callable[[], str]) -> IO[bytes]:
        try:
            return await written(path)
        except FileNotFoundError:
            raise ValueError(
                f"the server at {self.url} writes hidden states to {path}, but {path}.lock is not there for this process; "
                f"let both see one directory under one name, {remedy()}"
            ) from None

    def _hand_on(self, index: int, row: TokenRow, completion: Completion, lock: IO[bytes], add: Add) -> None:
        assert completion.hidden_states_path is not None
        found = take(completion.hidden_states_path, lock)
        add(index, self._checked(row, found), completion.token_ids[0])

    def _checked(self, row: TokenRow, found: RowStates) -> Tensor:
        """[T, A + 1, H] engine dtype: the wanted layers and the last, which may be one of them."""
        assert self.layer_ids is not None
        if found.token_ids.tolist() != row.token_ids:
            raise RuntimeError(f"row {row.sample_id}: the server captured other token ids than it was sent")
        captured = self.captured
        came = found.states.shape[1] if found.layer_ids is None else found.layer_ids.tolist()
        if came != (len(captured) if found.layer_ids is None else captured):
            raise ValueError(
                f"the server must capture layers {captured}, it captures {came}; {self._how_to_serve()}"
            )
        if found.layer_ids is None and not self.warned_of_layers:
            self.warned_of_layers = True
            logger.warning(
                "the server's files do not name their layers, so only their number is checked; they must be %s",
                captured,
            )
        shape = (len(row.token_ids), len(captured), self.model["hidden_size"])
        if tuple(found.states.shape) != shape or found.states.dtype != getattr(torch, self.dtype):
            raise RuntimeError(
                f"row {row.sample_id}: its states must be {shape} {self.dtype}, the server wrote {tuple(found.states.shape)} "
                f"{str(found.states.dtype).removeprefix('torch.')}; {self._how_to_serve()}"
            )
        columns = [captured.index(k) for k in [*self.layer_ids, captured[-1]]]
        return found.states if len(set(columns)) == len(columns) else found.states[:, columns]

    def _how_to_serve(self) -> str:
        line = serve_line(self.target_dir, self.layer_ids or [], EngineConfig(**self.config))
        return (
            f"start it, with this package installed beside it and, if it is to ask for a key, that in VLLM_API_KEY there and in "
            f"{KEY_VARIABLE} here, by\n{line}"
        )


class _Session:
    """One call's requests under one id, so that files that nobody read can be told from other calls' and deleted at the end."""

    def __init__(self, url: str, max_in_flight: int) -> None:
        self.client = ServerClient(url, max_in_flight)
        self.id = f"eagle3-{uuid.uuid4().hex}"
        self.directories: set[Path] = set()

    async def __aenter__(self) -> "_Session":
        await self.client.__aenter__()
        return self

    async def __aexit__(self, *failure: Any) -> None:
        await self.client.__aexit__(*failure)
        if self.directories and failure[0] is not None:
            await asyncio.sleep(ABORT_S)
        sweep(self.directories, self.id)

    async def complete(
        self, model: str, prompt: list[int], wanted: int, index: int, sampling: dict[str, Any]
    ) -> Completion:
        """Answer one prompt with `wanted` tokens or an earlier stop."""
        completion = await self.client.complete(model, prompt, wanted, f"{self.id}-{index}", **sampling)
        path = completion.hidden_states_path
        if path is not None and not Path(path).name.startswith(f"cmpl-{self.id}-{index}-"):
            # It is opened and deleted here: no other file may be.
            raise RuntimeError(
                f"the server at {self.client.url} names a file that is not this request's: {path}; see its connector's settings"
            )
        if completion.hidden_states_path is not None:
            self.directories.add(Path(completion.hidden_states_path).parent)
        if completion.finish_reason == "length" and len(completion.token_ids) != wanted:
            raise RuntimeError(
                f"prompt {index}: {wanted} tokens were asked for, the server at {self.client.url} stopped after "
                f"{len(completion.token_ids)}; its own limit is lower, start it with --generation-config vllm"
            )
        return completion


def draft_counts(metrics: str) -> Counter[str | int]:
    """Speculative rounds as `drafts` and `accepted_tokens`, the latter by draft position 0 … k - 1 too, from Prometheus text."""
    counts: Counter[str | int] = Counter()
    for name, labels, value in DRAFT_COUNTER.findall(metrics):
        position = re.search(r'position="(\d+)"', labels)
        counts[int(position.group(1)) if position else name] += int(float(value))
    return counts
