"""What an engine is asked and what it answers: token ids in, token ids out."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Sampling:
    """temperature: 0 is greedy. max_new_tokens: longest answer. ignore_eos: no answer is shorter."""

    temperature: float
    top_p: float
    max_new_tokens: int
    ignore_eos: bool = False


@dataclass(frozen=True)
class Request:
    """One prompt of T token ids, and its sampling."""

    prompt: list[int]
    sampling: Sampling


@dataclass(frozen=True)
class Answer:
    """One answer. token_ids include the end token when finish_reason is "stop"; otherwise it is "length"."""

    token_ids: list[int]
    finish_reason: str


# Takes an answer of the conversation with this number; returns its next request, None when it is over.
Follow = Callable[[int, Answer], Request | None]
