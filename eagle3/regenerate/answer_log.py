"""The answers of an unfinished shard, kept as they arrive: a later attempt asks only for what is missing.

Each answer is a line of JSON: conversation, number of earlier answers, key of the prompt, token ids, finish
reason. Each attempt writes its own files, so two attempts at once lose nothing. In a directory it is one file
that grows with every answer; in a store, whose files cannot grow, a new file every FLUSH_EVERY_S.
"""

import json
import logging
import time
import uuid
from pathlib import Path

from eagle3.data.encode import tokens_key
from eagle3.files import is_remote, list_files, read_bytes, write_bytes
from eagle3.regenerate.answers import Answer

FLUSH_EVERY_S = 20.0

logger = logging.getLogger(__name__)


class AnswerLog:
    """The log of one shard under one set of settings. A context manager that writes what is left at its end.

    Args:
        uri: directory or fsspec URL of this log alone.

    Raises:
        OSError: if it cannot be read or written; names it.
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self.found: dict[tuple[int, int], tuple[str, Answer]] = {}
        self.attempt = uuid.uuid4().hex[:12]
        self.num_parts = 0
        self.lines: list[str] = []
        self.flushed_at = time.monotonic()
        self.is_remote = is_remote(uri)
        if not self.is_remote:
            Path(uri).mkdir(parents=True, exist_ok=True)
        for part in list_files(uri, "answers-*.jsonl"):
            self._read(read_bytes(part) or b"")

    def __enter__(self) -> "AnswerLog":
        return self

    def __exit__(self, *error: object) -> None:
        self._flush()

    def find(self, conversation: int, number: int, prompt: list[int]) -> Answer | None:
        """An earlier attempt's answer to this prompt; None if there is none."""
        key, answer = self.found.get((conversation, number), ("", None))
        return answer if key == tokens_key(prompt) else None

    def add(self, conversation: int, number: int, prompt: list[int], answer: Answer) -> None:
        """Keep an answer."""
        fields = [conversation, number, tokens_key(prompt), answer.token_ids, answer.finish_reason]
        self.lines.append(json.dumps(fields) + "\n")
        if not self.is_remote or time.monotonic() - self.flushed_at >= FLUSH_EVERY_S:
            self._flush()

    def _flush(self) -> None:
        self.flushed_at = time.monotonic()
        if not self.lines:
            return
        part = f"{self.uri}/answers-{self.attempt}-{self.num_parts:05d}.jsonl"
        if self.is_remote:
            write_bytes(part, "".join(self.lines).encode())
            self.num_parts += 1
        else:
            try:
                with open(part, "a") as file:
                    file.writelines(self.lines)
            except OSError as e:
                raise OSError(f"{part} cannot be written ({e}); check the free disk space, run again") from e
        self.lines = []

    def _read(self, data: bytes) -> None:
        for line in data.splitlines():
            try:
                conversation, number, key, token_ids, finish_reason = json.loads(line)
                if not all(type(token) is int and token >= 0 for token in token_ids):
                    raise ValueError(token_ids)
                self.found[conversation, number] = key, Answer(token_ids, finish_reason)
            except (ValueError, TypeError, RecursionError):
                # The last line of a killed attempt, or a line that a broken disk changed.
                logger.warning("%s: an answer that was cut off is asked for again", self.uri)
