"""Rendered text cut into pieces that are tokenized on their own: at answers, and inside what only looks like a tag.

**Tags in contents.** A user may write `<|im_end|>`. Such words get a private-use character, the mark, behind their first one
before the template sees them, and the rendering is cut there: tokenized apart, the halves are plain text for any tokenizer.

    content   What does <|im_end|> mean?
    rendered  <|im_start|>user⏎What does <▮|im_end|> mean?<|im_end|>⏎
    pieces    <|im_start|>user⏎What does <     |im_end|> mean?<|im_end|>⏎
"""

import re
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

PRIVATE_USE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE))


class Piece(NamedTuple):
    """A stretch of rendered text that is tokenized on its own; its first `num_answer` characters are the model's text."""

    text: str
    num_answer: int


class Answer(NamedTuple):
    """A rendering that ends with an assistant turn: text[begin:end] is the model's; `closed` if a control token ends it."""

    text: str
    begin: int
    end: int
    closed: bool


class Tags:
    """Texts that a tokenizer would read as control tokens."""

    def __init__(self, texts: Iterable[str]) -> None:
        either = "|".join(re.escape(t) for t in sorted(texts, key=len, reverse=True) if len(t) > 1) or "(?!)"
        self.pattern = re.compile(either)
        self.starts = re.compile(f"(?={either}).", re.DOTALL)

    def broken(self, value: Any, mark: str) -> Any:
        """The value with the mark behind the first character of every tag in its strings, overlapping tags included."""
        if isinstance(value, str):
            return self.starts.sub(lambda m: m.group() + mark, value) if self.pattern.search(value) else value
        if isinstance(value, list):
            return [self.broken(v, mark) for v in value]
        if isinstance(value, dict):
            return {self.broken(k, mark): self.broken(v, mark) for k, v in value.items()}
        return value


def marks_for(text: str) -> Iterator[str]:
    """Characters that are not in the text, and are not spelled out there by their code."""
    return (c for c in map(chr, chain(*PRIVATE_USE)) if c not in text and escaped(c) not in text)


def escaped(character: str) -> str:
    """As JSON spells a character that it does not write as it is."""
    return ascii(character)[1:-1]


def cut_at_answers(answers: list[Answer], mark: str) -> Iterator[Piece]:
    """Cut before every answer, where serving ends its prompt, and behind those that no control token ends."""
    text = answers[-1].text[: answers[-1].end]
    yield from cut_at_marks(text[: answers[0].begin], 0, mark)
    ends = [answer.begin for answer in answers[1:]] + [len(text)]
    for answer, end in zip(answers, ends, strict=True):
        cut = end if answer.closed else answer.end
        yield from cut_at_marks(text[answer.begin : cut], answer.end - answer.begin, mark)
        yield from cut_at_marks(text[cut:end], 0, mark)


def cut_at_marks(text: str, num_answer: int, mark: str) -> Iterator[Piece]:
    """Cut at every mark; the first `num_answer` characters of the text, marks counted, are the model's."""
    for part in text.split(mark):
        if part:
            yield Piece(part, min(max(num_answer, 0), len(part)))
        num_answer -= len(part) + len(mark)
