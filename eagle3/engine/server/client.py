"""Asks a running vLLM server for completions: token ids in, token ids out, many in flight.

Transient errors are tried again after growing pauses: a lost connection, a time-out, 408, 429, 5xx, an answer
that is not JSON. Other 4xx are raised at once with the server's own words. The server's key comes from the
environment and is sent in one header: it is in no message, setting or manifest.
"""

import asyncio
import logging
import os
import random
import time
from typing import Any, Self, TypeVar

import httpx
from pydantic import BaseModel, Field, ValidationError

from eagle3.errors import EngineDied
from eagle3.regenerate.answers import Answer
from eagle3.uris import redact

logger = logging.getLogger(__name__)

KEY_VARIABLE = "EAGLE3_SERVER_KEY"
# Pauses of 0.5, 1, 2 … 30 s, about two minutes in all: longer than a proxy's restart, shorter than a GPU
# should be idle.
MAX_ATTEMPTS = 10
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
CONNECT_TIMEOUT_S = 10.0
# An answer arrives as a whole: at 8 tokens a second, and after as long a wait in the server's queue.
READ_TIMEOUT_S, READ_TIMEOUT_PER_TOKEN_S = 600.0, 0.25
# Servers close idle connections after 5 s: one that is about to be closed must not be used again.
KEEP_ALIVE_S = 3.0
# A pool looks at all its connections several times a request: 256 in one pool take 10 ms of CPU a request, in
# pools of 8 2.2 ms.
POOL_SIZE = 8
WARN_EVERY_S = 10.0
EXCERPT_CHARACTERS = 300
Model = TypeVar("Model", bound=BaseModel)


class ServedModel(BaseModel):
    """One entry of /v1/models."""

    id: str
    max_model_len: int | None = None


class _Models(BaseModel):
    data: list[ServedModel]


class _Choice(BaseModel):
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: str


class _Completions(BaseModel):
    choices: list[_Choice] = Field(min_length=1, max_length=1)


class ServerClient:
    """A server's URL with its connections; use it as an async context.

    Args:
        url: http(s)://host[:port][/prefix], with or without a last /v1.
        max_in_flight: requests at once, at most.
        max_attempts: of each request.
    """

    def __init__(self, url: str, max_in_flight: int = 1, max_attempts: int = MAX_ATTEMPTS) -> None:
        self.url = server_root(url)
        self.max_attempts = max_attempts
        self._key = _server_key()
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        # Once for all pools: loading certificates takes 0.2 s.
        tls = httpx.create_ssl_context() if self.url.startswith("https") else False
        limits = httpx.Limits(
            max_connections=POOL_SIZE, max_keepalive_connections=POOL_SIZE, keepalive_expiry=KEEP_ALIVE_S
        )
        pools = range(0, max_in_flight, POOL_SIZE)
        self._pools = [httpx.AsyncClient(headers=headers, verify=tls, limits=limits) for _ in pools]
        self._free = self._pools * POOL_SIZE
        self._warned_at = -WARN_EVERY_S

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *failure: Any) -> None:
        for pool in self._pools:
            await pool.aclose()

    async def models(self) -> list[ServedModel]:
        """What the server serves, adapters included."""
        return (await self._ask("GET", "/v1/models", _Models)).data

    async def complete(self, model: str, prompt: list[int], max_tokens: int, **sampling: Any) -> Answer:
        """Answer one prompt.

        Args:
            prompt: token ids, sent and answered as such; the server adds nothing to them.
            max_tokens: longest answer.
            sampling: further fields of /v1/completions.

        Raises:
            ValueError: if the server refuses the request.
            EngineDied: if it gives no usable answer in `max_attempts`.
            RuntimeError: if it answers another prompt.
        """
        body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, **sampling}
        body["return_token_ids"] = True
        read_s = READ_TIMEOUT_S + READ_TIMEOUT_PER_TOKEN_S * max_tokens
        answer = await self._ask("POST", "/v1/completions", _Completions, body, read_s)
        choice = answer.choices[0]
        if choice.prompt_token_ids != prompt:
            raise RuntimeError(
                f"the server at {self.url} answered another prompt than it was sent: "
                f"{_difference(prompt, choice.prompt_token_ids)}; it must not truncate or change token ids"
            )
        if choice.finish_reason not in ("stop", "length"):
            raise EngineDied(
                f"the server at {self.url} ended an answer with {choice.finish_reason!r}; see its log, "
                "then run again"
            )
        return Answer(choice.token_ids, choice.finish_reason)

    async def _ask(
        self,
        method: str,
        path: str,
        model: type[Model],
        body: dict[str, Any] | None = None,
        read_timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> Model:
        timeout = httpx.Timeout(CONNECT_TIMEOUT_S, read=read_timeout_s, pool=None)
        start = time.monotonic()
        fault = _Transient("")
        for attempt in range(1, self.max_attempts + 1):
            try:
                return self._read(await self._request(method, path, body, timeout), path, model)
            except httpx.RequestError as e:
                fault = _Transient(f"{type(e).__name__} {e}".strip())
            except _Transient as e:
                fault = e
            if attempt < self.max_attempts:
                self._warn(fault, attempt)
                pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (attempt - 1)) * random.uniform(0.5, 1)
                await asyncio.sleep(max(pause_s, fault.pause_s))
        raise EngineDied(
            f"the server at {self.url} gave no answer to {path} in {self.max_attempts} attempts over "
            f"{time.monotonic() - start:.0f} s, at last: {fault}; see that it runs and can be reached from "
            "here, then run again"
        )

    async def _request(
        self, method: str, path: str, body: dict[str, Any] | None, timeout: httpx.Timeout
    ) -> httpx.Response:
        pool = self._free.pop()
        try:
            return await pool.request(method, self.url + path, json=body, timeout=timeout)
        finally:
            self._free.append(pool)

    def _read(self, response: httpx.Response, path: str, model: type[Model]) -> Model:
        status = response.status_code
        said = f"{status} {self._excerpt(response.text)}"
        if status in (408, 429) or status >= 500:
            raise _Transient(said, _retry_after_s(response))
        if not response.is_success:
            remedy = "see that the URL is the server's own and that both run the same vLLM version"
            if status in (401, 403):
                remedy = f"set the environment variable {KEY_VARIABLE} to the server's API key"
            elif status == 400:
                remedy = "see the server's settings"
            raise ValueError(f"the server at {self.url} refused {path}: {said}; {remedy}")
        try:
            return model.model_validate_json(response.content)
        except ValidationError as e:
            first = e.errors(include_input=False, include_url=False, include_context=False)[0]
        if first["type"] == "json_invalid":  # a proxy's page, or cut off
            raise _Transient(f"no JSON but {self._excerpt(response.text)!r}")
        where = ".".join(map(str, first["loc"]))
        raise RuntimeError(
            f"the server at {self.url} answered {path} without a field that is needed "
            f"({where}: {first['msg']}); it has to be vLLM, 0.10.2 or newer, which returns token ids"
        )

    def _excerpt(self, text: str) -> str:
        """The start of a server's text for a message; without the key, which some servers repeat."""
        without_key = text.replace(self._key, "…") if self._key else text
        return " ".join(without_key.split())[:EXCERPT_CHARACTERS]

    def _warn(self, fault: Exception, attempt: int) -> None:
        if time.monotonic() - self._warned_at >= WARN_EVERY_S:
            self._warned_at = time.monotonic()
            text = "the server at %s: %s; attempt %d of %d, trying again"
            logger.warning(text, self.url, fault, attempt, self.max_attempts)


class _Transient(Exception):
    """No usable answer, but the next try may get one, after a pause of at least pause_s seconds."""

    def __init__(self, text: str, pause_s: float = 0.0) -> None:
        super().__init__(text)
        self.pause_s = pause_s


def server_root(url: str) -> str:
    """The URL without its last slash and /v1.

    Raises:
        ValueError: if it is no http(s) URL or has a user name or password.
    """
    if "@" in url:  # not shown: it may have a password
        raise ValueError(f"the server's URL must carry no user or password; put the key into {KEY_VARIABLE}")
    must = f"the server's URL must read http://host:port without a query, got {redact(url)!r}"
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as e:
        raise ValueError(f"{must}: {e}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host or parsed.query or parsed.fragment:
        raise ValueError(must)
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _server_key() -> str:
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ValueError(
            f"{KEY_VARIABLE} must hold printable ASCII characters only; set it to the server's API key"
        )
    return key


def _retry_after_s(response: httpx.Response) -> float:
    """The server's Retry-After in seconds, at most LONGEST_PAUSE_S; dates are not read."""
    seconds = response.headers.get("retry-after", "")
    return min(LONGEST_PAUSE_S, float(seconds)) if seconds.isdecimal() else 0.0


def _difference(sent: list[int], returned: list[int]) -> str:
    if len(sent) != len(returned):
        return f"{len(sent)} tokens were sent, {len(returned)} came back"
    i = next(i for i, (a, b) in enumerate(zip(sent, returned, strict=True)) if a != b)
    return f"token {i} was sent as {sent[i]} and came back as {returned[i]}"
