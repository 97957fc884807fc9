"""A client of vLLM's completions API with token ids as prompts and answers.

It retries transient errors with backoff: lost connections, timeouts, 408, 429, 5xx and bodies that are not
JSON. It raises other 4xx at once with the server's message. The API key comes from the environment and is
sent in a header; no message, setting or manifest contains it.
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
# Pauses of 0.5, 1, 2 … 30 s, two minutes in all: a proxy restarts within that time.
MAX_ATTEMPTS = 10
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
CONNECT_TIMEOUT_S = 10.0
# Answers are not streamed: allow 8 tokens per second, and as long again in the server's queue.
READ_TIMEOUT_S, READ_TIMEOUT_PER_TOKEN_S = 600.0, 0.25
# vLLM closes idle connections after 5 s; drop them earlier, so that no request uses a closing one.
KEEP_ALIVE_S = 3.0
# httpx scans a pool's connections several times per request: one pool of 256 takes 10 ms of CPU per request,
# pools of 8 take 2.2 ms.
POOL_SIZE = 8
WARN_EVERY_S = 10.0
EXCERPT_CHARACTERS = 300
Model = TypeVar("Model", bound=BaseModel)


class ServedModel(BaseModel):
    """An entry of /v1/models."""

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
    """An async context manager with a server's connections.

    Args:
        url: http(s)://host[:port][/prefix], with or without /v1 at the end.
        max_in_flight: most concurrent requests.
        max_attempts: per request.
    """

    def __init__(self, url: str, max_in_flight: int = 1, max_attempts: int = MAX_ATTEMPTS) -> None:
        self.url = server_root(url)
        self.max_attempts = max_attempts
        self._key = _server_key()
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        # Shared by all pools: loading certificates takes 0.2 s.
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

    async def __aexit__(self, *error: object) -> None:
        for pool in self._pools:
            await pool.aclose()

    async def models(self) -> list[ServedModel]:
        """List the served models, LoRA adapters included."""
        return (await self._ask("GET", "/v1/models", _Models)).data

    async def complete(self, model: str, prompt: list[int], max_tokens: int, **sampling: Any) -> Answer:
        """Answer one prompt; `sampling` are further fields of /v1/completions.

        Raises:
            ValueError: if the server refuses the request.
            EngineDied: if it gives no usable answer in `max_attempts`.
            RuntimeError: if it returns other prompt token ids than it was sent.
        """
        body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, **sampling}
        body["return_token_ids"] = True
        read_s = READ_TIMEOUT_S + READ_TIMEOUT_PER_TOKEN_S * max_tokens
        answer = await self._ask("POST", "/v1/completions", _Completions, body, read_s)
        choice = answer.choices[0]
        if choice.prompt_token_ids != prompt:
            raise RuntimeError(
                f"the server at {self.url} answered another prompt: "
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
        error = _Transient("")
        for attempt in range(1, self.max_attempts + 1):
            try:
                return self._read(await self._request(method, path, body, timeout), path, model)
            except httpx.RequestError as e:
                error = _Transient(f"{type(e).__name__} {e}".strip())
            except _Transient as e:
                error = e
            if attempt < self.max_attempts:
                self._warn(error, attempt)
                pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (attempt - 1)) * random.uniform(0.5, 1)
                await asyncio.sleep(max(pause_s, error.pause_s))
        raise EngineDied(
            f"the server at {self.url} gave no answer to {path} in {self.max_attempts} attempts over "
            f"{time.monotonic() - start:.0f} s, last error: {error}; see that it runs and can be reached "
            "from here, then run again"
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
        answer = f"{status} {self._excerpt(response.text)}"
        if status in (408, 429) or status >= 500:
            raise _Transient(answer, _retry_after_s(response))
        if not response.is_success:
            remedy = "see that the URL is the server's own and that both run the same vLLM version"
            if status in (401, 403):
                remedy = f"set the environment variable {KEY_VARIABLE} to the server's API key"
            elif status == 400:
                remedy = "see the server's settings"
            raise ValueError(f"the server at {self.url} refused {path}: {answer}; {remedy}")
        try:
            return model.model_validate_json(response.content)
        except ValidationError as e:
            first = e.errors(include_input=False, include_url=False, include_context=False)[0]
        if first["type"] == "json_invalid":  # an error page of a proxy, or a truncated body
            raise _Transient(f"no JSON but {self._excerpt(response.text)!r}")
        where = ".".join(map(str, first["loc"]))
        raise RuntimeError(
            f"the server at {self.url} answered {path} without a required field "
            f"({where}: {first['msg']}); it must run vLLM 0.10.2 or newer, which returns token ids"
        )

    def _excerpt(self, text: str) -> str:
        """Shorten a server's text for a message and remove the API key, which some servers repeat."""
        without_key = text.replace(self._key, "…") if self._key else text
        return " ".join(without_key.split())[:EXCERPT_CHARACTERS]

    def _warn(self, error: Exception, attempt: int) -> None:
        if time.monotonic() - self._warned_at >= WARN_EVERY_S:
            self._warned_at = time.monotonic()
            text = "the server at %s: %s; attempt %d of %d, retrying"
            logger.warning(text, self.url, error, attempt, self.max_attempts)


class _Transient(Exception):
    """No usable answer; retry after at least pause_s seconds."""

    def __init__(self, text: str, pause_s: float = 0.0) -> None:
        super().__init__(text)
        self.pause_s = pause_s


def server_root(url: str) -> str:
    """Strip the last slash and /v1; raises ValueError unless it is an http(s) URL without credentials."""
    if "@" in url:  # the URL may contain a password: keep it out of the message
        raise ValueError(
            f"the server's URL must contain no user or password; put the key into {KEY_VARIABLE}"
        )
    rule = f"the server's URL must read http://host:port without a query, got {redact(url)!r}"
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as e:
        raise ValueError(f"{rule}: {e}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host or parsed.query or parsed.fragment:
        raise ValueError(rule)
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _server_key() -> str:
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ValueError(f"{KEY_VARIABLE} must contain printable ASCII only; set it to the server's API key")
    return key


def _retry_after_s(response: httpx.Response) -> float:
    """The Retry-After header in seconds, at most LONGEST_PAUSE_S; 0 if it is missing or a date."""
    seconds = response.headers.get("retry-after", "")
    return min(LONGEST_PAUSE_S, float(seconds)) if seconds.isdecimal() else 0.0


def _difference(sent: list[int], returned: list[int]) -> str:
    if len(sent) != len(returned):
        return f"{len(sent)} tokens were sent, {len(returned)} came back"
    i = next(i for i, (a, b) in enumerate(zip(sent, returned, strict=True)) if a != b)
    return f"token {i} was sent as {sent[i]} and came back as {returned[i]}"
