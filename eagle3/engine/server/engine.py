"""An engine that sends requests to a user's running vLLM server. It cannot capture or speculate.

Requests have no seed, because a CPU build of vLLM crashes at the first seeded request. Answers repeat only at
temperature 0, up to rounding differences between batches.
"""

import asyncio
import logging

from eagle3.engine.interface import EngineSettings
from eagle3.engine.progress import Report
from eagle3.engine.server.client import ServedModel, ServerClient
from eagle3.regenerate.answers import Answer, Follow, Request
from eagle3.targets.properties import end_of_turn_ids

logger = logging.getLogger(__name__)

# Four attempts in four seconds: a running server answers at once.
START_ATTEMPTS = 4
# A server takes missing fields from the target's generation_config.json; the other engines do not.
NEUTRAL = {
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


class ServerEngine:
    """Sends requests to the server at `settings.server_url`.

    Raises:
        ValueError: if it does not serve exactly one model, or allows less than `engine.max_model_len`.
        EngineDied: if it does not answer.
    """

    def __init__(self, settings: EngineSettings) -> None:
        assert settings.server_url is not None
        self.settings = settings
        self.url = settings.server_url
        self.max_in_flight = 2 * settings.engine.max_num_seqs
        self.end_ids = end_of_turn_ids(settings.target_dir)
        self.served = asyncio.run(self._served_model())

    async def _served_model(self) -> ServedModel:
        async with ServerClient(self.url, max_attempts=START_ATTEMPTS) as client:
            models = await client.models()
        if len(models) != 1:
            raise ValueError(
                f"the server at {self.url} must serve exactly one model, got {[m.id for m in models]}; "
                "start one with the target alone, without adapters"
            )
        needed = self.settings.engine.max_model_len
        if (models[0].max_model_len or 0) < needed:
            raise ValueError(
                f"the server at {self.url} must take {needed} tokens, it takes {models[0].max_model_len}; "
                f"start it with --max-model-len {needed}, or lower engine.max_model_len"
            )
        return models[0]

    def answer(self, requests: dict[int, Request], follow: Follow, seed: int, report: Report) -> None:
        if any(request.sampling.temperature > 0 for request in requests.values()):
            logger.warning(
                "seed %d is ignored: a server uses its own, so these answers differ from run to run", seed
            )
        asyncio.run(self._answer(requests, follow, report))

    async def _answer(self, requests: dict[int, Request], follow: Follow, report: Report) -> None:
        slots = asyncio.Semaphore(self.max_in_flight)
        async with ServerClient(self.url, self.max_in_flight) as client:

            async def converse(i: int) -> None:
                request: Request | None = requests[i]
                async with slots:
                    while request:
                        answer = await self._complete(client, request)
                        request = follow(i, answer)
                        report.add(len(answer.token_ids), request is None)
                        report.send_if_due()

            try:
                async with asyncio.TaskGroup() as group:
                    for i in requests:
                        group.create_task(converse(i))
            except ExceptionGroup as errors:  # the first one has cancelled the other conversations
                raise errors.exceptions[0] from None

    async def _complete(self, client: ServerClient, request: Request) -> Answer:
        sampling = request.sampling
        # A server refuses a request that may exceed its own max_model_len.
        wanted = min(sampling.max_new_tokens, self.settings.engine.max_model_len - len(request.prompt))
        answer = await client.complete(
            self.served.id,
            request.prompt,
            wanted,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            ignore_eos=sampling.ignore_eos,
            stop_token_ids=[] if sampling.ignore_eos else self.end_ids,
            **NEUTRAL,
        )
        if answer.finish_reason == "length" and len(answer.token_ids) != wanted:
            raise RuntimeError(
                f"{wanted} tokens were asked for, the server at {self.url} stopped after "
                f"{len(answer.token_ids)}; its own limit is lower: start it with --generation-config vllm"
            )
        return answer
