"""Settings of an engine, the methods that every engine has, and the answers that it returns."""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from eagle3.config.engine import EngineConfig
from eagle3.engine.progress import Report
from eagle3.regenerate.answers import Answer, Follow, Request
from eagle3.shards.tokens import TokenRow
from eagle3.targets.properties import check_max_model_len

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)
# Takes a row's index, its states [T, A + 1, H] (CPU, engine dtype) and the engine's greedy next token.
AddRow = Callable[[int, "Tensor", int], None]


@dataclass(frozen=True)
class Speculation:
    """An exported draft, and the number of tokens that it proposes per round."""

    draft_dir: str
    num_tokens: int


@dataclass(frozen=True)
class EngineSettings:
    """Equal settings share one engine.

    target_dir: absolute path. layer_ids: aux layers to capture. server_url: a running vLLM server to use
    instead. files: name, size and mtime of the target's and the draft's files: new files need a new engine.
    """

    target_dir: str
    engine: EngineConfig
    layer_ids: tuple[int, ...] | None
    speculation: Speculation | None
    tensor_parallel_size: int
    server_url: str | None
    files: tuple[tuple[str, int, int], ...]

    @classmethod
    def from_dirs(
        cls,
        target_dir: str | Path,
        engine: EngineConfig,
        *,
        layer_ids: Sequence[int] | None = None,
        speculation: Speculation | None = None,
        tensor_parallel_size: int = 1,
        server_url: str | None = None,
    ) -> "EngineSettings":
        """Resolve paths and stat files; raises ValueError if the target allows no such `max_model_len`."""
        target = Path(target_dir).resolve()
        check_max_model_len(engine.max_model_len, json.loads((target / "config.json").read_text()))
        if tensor_parallel_size > 1 and (engine.engine == "transformers" or server_url):
            logger.warning(
                "tensor_parallel_size %d is ignored: it applies only to a vLLM engine started here",
                tensor_parallel_size,
            )
        files = _stamps(target)
        if speculation is not None:
            draft = Path(speculation.draft_dir).resolve()
            speculation = Speculation(str(draft), speculation.num_tokens)
            files += _stamps(draft)
        layers = None if layer_ids is None else tuple(layer_ids)
        return cls(str(target), engine, layers, speculation, tensor_parallel_size, server_url or None, files)

    @property
    def library(self) -> str:
        """The package that the engine imports."""
        return "httpx" if self.server_url else self.engine.engine


def _stamps(directory: Path) -> tuple[tuple[str, int, int], ...]:
    files = sorted([*directory.glob("*.safetensors"), *directory.glob("*.json")])
    return tuple((f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files)


@dataclass(frozen=True)
class Generation:
    """Answers in the order of their prompts.

    seconds: excludes the engine's start. num_drafts: speculative rounds. accepted_per_position: accepted
    draft tokens at draft position 1 … k; empty without a draft.
    """

    answers: list[Answer]
    seconds: float = 0.0
    num_drafts: int = 0
    accepted_per_position: tuple[int, ...] = ()

    @property
    def generated_tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers)


class AnsweringEngine(Protocol):
    """An engine that generates answers; a server can do no more."""

    settings: EngineSettings

    def answer(self, requests: dict[int, Request], follow: Follow, seed: int, report: Report) -> None:
        """Answer each conversation's request, then those that `follow` returns, until it returns None."""


class Engine(AnsweringEngine, Protocol):
    """An engine that also captures hidden states and speculates: vLLM or the transformers reference."""

    def warm_up(self, requests: list[Request]) -> None:
        """Prepare a measurement: warm up once, and empty the prefix cache."""

    def draft_counts(self) -> tuple[int, tuple[int, ...]]:
        """Speculative rounds so far, and accepted draft tokens at position 1 … k; (0, ()) without a draft."""

    def capture(self, rows: list[TokenRow], add_row: AddRow) -> int:
        """Call `add_row` for every row, in any order, with its states at the aux layers and the last layer.

        Returns:
            Number of tokens found in the prefix cache.
        """

    def describe(self) -> dict[str, Any]:
        """Return every setting that can change a state, for the manifest."""
