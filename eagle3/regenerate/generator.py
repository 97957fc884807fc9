"""The regenerate stage: the target answers the prompt rows of a token shard, chats and tool tasks, turn by
turn."""

import logging
from collections import Counter
from collections.abc import Sequence

from eagle3.config.engine import RegenerateConfig
from eagle3.data.chat import load_chat_tokenizer
from eagle3.data.script import Script
from eagle3.regenerate.answer_log import AnswerLog
from eagle3.regenerate.answers import Answer, Request, Sampling
from eagle3.regenerate.episode import MIN_ANSWER_TOKENS, Episode, Limits
from eagle3.regenerate.parsers import AnswerReader, check_parsers
from eagle3.shards.tokens import TokenRow
from eagle3.targets.properties import end_of_turn_ids

WARN_AT_LIMIT = 0.2

logger = logging.getLogger(__name__)


class AnswerGenerator:
    """All conversations of a shard: `num_turns_done` of `num_turns` user turns need no more answers.

    Args:
        rows: prompts, with masks that are all False, and rows with answers, which stay unchanged.
        target_dir: for its tokenizer and chat template, where a conversation has more than one answer.
        cfg: sampling, limits and parsers.
        max_model_len: of the engine.
        log: answers of earlier attempts are taken from it, new ones are added to it.

    Raises:
        ValueError: if rows have tools and the target's chat template shows none or no parser reads its calls.
    """

    def __init__(
        self,
        rows: Sequence[TokenRow],
        target_dir: str,
        cfg: RegenerateConfig,
        max_model_len: int,
        log: AnswerLog,
    ) -> None:
        self.rows = rows
        self.log = log
        end_ids = end_of_turn_ids(target_dir)
        reader = _reader(rows, target_dir, cfg)
        self.sampling = {source: Sampling(*cfg.sampling(source)) for source in {row.source for row in rows}}
        self.episodes: dict[int, Episode] = {}
        for i, row in enumerate(rows):
            if not any(row.loss_mask):
                limits = Limits(max_model_len, self.sampling[row.source].max_new_tokens, cfg.max_tool_rounds)
                self.episodes[i] = Episode(row, limits, reader, end_ids)
        self.num_turns = sum(episode.counts["requested"] for episode in self.episodes.values())
        self.num_found = 0
        self.num_turns_done = 0

    def start(self) -> dict[int, Request]:
        """The first requests, by the row's number, after the answers that the log has."""
        requests = {}
        for i, episode in self.episodes.items():
            while episode.prompt and (answer := self.log.find(i, episode.num_answers, episode.prompt)):
                self._take(episode, answer)
                self.num_found += 1
            if request := self._request(i):
                requests[i] = request
        if self.num_found:
            logger.info("%d answers of an earlier attempt are kept", self.num_found)
        return requests

    def follow(self, i: int, answer: Answer) -> Request | None:
        """Take the answer of row i; returns the next request of its conversation."""
        episode = self.episodes[i]
        assert episode.prompt is not None
        self.log.add(i, episode.num_answers, episode.prompt, answer)
        self._take(episode, answer)
        return self._request(i)

    def result(self) -> tuple[list[TokenRow], dict[str, int]]:
        """The rows in order, without those that train nothing, and the sum of the episodes' counts."""
        done = [
            row
            for i, row in enumerate(self.rows)
            for row in (self.episodes[i].rows if i in self.episodes else [row])
        ]
        total = sum((episode.counts for episode in self.episodes.values()), Counter[str]())
        return done, {"conversations": len(self.episodes)} | dict(total)

    def _take(self, episode: Episode, answer: Answer) -> None:
        before = episode.num_turns_done
        episode.take(answer)
        self.num_turns_done += episode.num_turns_done - before

    def _request(self, i: int) -> Request | None:
        prompt = self.episodes[i].prompt
        return None if prompt is None else Request(prompt, self.sampling[self.rows[i].source])


def _reader(rows: Sequence[TokenRow], target_dir: str, cfg: RegenerateConfig) -> AnswerReader | None:
    """A reader of the target's answers, if any row needs one."""
    scripted = [row for row in rows if row.script]
    if not scripted:
        return None
    tokenizer = load_chat_tokenizer(target_dir)
    for row in scripted:
        if names := [tool["function"]["name"] for tool in Script.from_json(row.script).tools or []]:
            check_parsers(cfg, has_tools=True)
            prompt = tokenizer.decode(row.token_ids)
            if not any(name in prompt for name in names):
                raise ValueError(
                    "the target's chat template must show tools, got a prompt without any of "
                    f"{', '.join(names)}; give target.chat_template, such as workflows/recipes/tools.jinja"
                )
            break
    return AnswerReader(tokenizer, cfg)


def outcomes_text(counts: dict[str, int]) -> str:
    """One line for people: requested = answered + failed + skipped, failures by reason."""
    number = {name: f"{count:,}" for name, count in sorted(counts.items())}
    failures = [
        f"{name.removeprefix('failed: ')} {text}"
        for name, text in number.items()
        if name.startswith("failed: ")
    ]
    reasons = f" ({', '.join(failures)})" if failures else ""
    conversations, requested, answered, failed, skipped, calls = (
        number.get(name, "0")
        for name in ("conversations", "requested", "answered", "failed", "skipped", "tool_calls")
    )
    outcomes = f"{answered} answered + {failed} failed{reasons} + {skipped} skipped after those"
    return f"{conversations} conversations, {requested} user turns requested = {outcomes}; {calls} tool calls"


def check_any_left(num_rows: int, counts: dict[str, int]) -> None:
    """Refuse to continue if no shard has a row left. counts: outcome counts of all shards."""
    if not num_rows:
        raise ValueError(
            f"one answer at least must have {MIN_ANSWER_TOKENS} tokens or more, got {outcomes_text(counts)}; "
            "raise regenerate.max_new_tokens if it is lower, or replace prompts that the target ends at once"
        )


def warn_of_limit(counts: dict[str, int], where: str) -> None:
    """Warn if many answers are cut at the length limit: a draft would not learn the end of a turn."""
    at_limit, requested = counts.get("at_length_limit", 0), counts.get("requested", 0)
    if at_limit > WARN_AT_LIMIT * requested:
        text = "%s: %d answers to %d user turns ended at the length limit; raise regenerate.max_new_tokens"
        logger.warning(text, where, at_limit, requested)
