"""The answers of an unfinished shard, kept as they come: a later attempt asks only for what is missing.

One line of JSON an answer: conversation, how many answers it had before, a key of the prompt, token ids, finish reason. Each
attempt writes files of its own, so that two at once lose nothing: in a directory one, a line at once with every answer; in a
store, whose files cannot grow, another one every FLUSH_EVERY_S.
"""

import json
import logging
import time
import uuid
from pathlib import Path
from types import TracebackType

from eagle3.data.encode import tokens_key
from eagle3.files import is_remote, list_files, read_bytes, write_bytes
from eagle3.regenerate.answers import Answer

FLUSH_EVERY_S = 20.0
PART_NAME = "answers-{}.jsonl"

logger = logging.getLogger(__name__)


class AnswerLog:
    """The log of one shard under one set of settings. Use as a context manager: leaving it writes what is left.

    Args:
        place: directory or fsspec URL; one place for one shard and one set of settings.

    Raises:
        OSError: if it cannot be read or written; names it.
    """

    def __init__(self, place: str) -> None:
        self.place = place
        self.found: dict[tuple[int, int], tuple[str, Answer]] = {}
        self.attempt, self.num_parts = uuid.uuid4().hex[:12], 0
        self.lines: list[str] = []
        self.flushed_at = time.monotonic()
        self.is_remote = is_remote(place)
        if not self.is_remote:
            Path(place).mkdir(parents=True, exist_ok=True)
        for part in list_files(place, PART_NAME.format("*")):
            self._read(read_bytes(part) or b"")

    def __enter__(self) -> "AnswerLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._flush()

    def find(self, conversation: int, number: int, prompt: list[int]) -> Answer | None:
        """An earlier attempt's answer to this prompt; None if there is none."""
        key, answer = self.found.get((conversation, number), ("", None))
        return answer if key == tokens_key(prompt) else None

    def add(self, conversation: int, number: int, prompt: list[int], answer: Answer) -> None:
        """Keep an answer."""
        line = json.dumps([conversation, number, tokens_key(prompt), answer.token_ids, answer.finish_reason])
        if not self.is_remote:
            self._append(line)
            return
        self.lines.append(line)
        if time.monotonic() - self.flushed_at >= FLUSH_EVERY_S:
            self._flush()

    def _append(self, line: str) -> None:
        part = self._part(self.num_parts)
        try:
            with open(part, "a") as file:
                file.write(line + "\n")
        except OSError as e:
            raise OSError(
                f"{part} could not be written ({e}); check the free disk space and run again"
            ) from e

    def _flush(self) -> None:
        if self.lines:
            write_bytes(self._part(self.num_parts), "".join(f"{line}\n" for line in self.lines).encode())
            self.num_parts += 1
            self.lines = []
        self.flushed_at = time.monotonic()

    def _part(self, number: int) -> str:
        return f"{self.place}/{PART_NAME.format(f'{self.attempt}-{number:05d}')}"

    def _read(self, data: bytes) -> None:
        for line in data.splitlines():
            try:
                conversation, number, key, token_ids, finish_reason = json.loads(line)
                if not all(type(token) is int and token >= 0 for token in token_ids):
                    raise ValueError(token_ids)
                self.found[conversation, number] = key, Answer(token_ids, finish_reason)
            except (ValueError, TypeError, RecursionError):
                # The last line of an attempt that was killed, or what a broken disk made of one.
                logger.warning("%s: an answer that was cut off is asked for again", self.place)
