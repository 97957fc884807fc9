"""RowEncoder and EncoderPool: outcomes that depend on nothing but the row, and rows that come as tokens."""

import json
import multiprocessing
import os
import signal
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from eagle3.config.data import DataConfig, SourceConfig
from eagle3.data import encode, pool
from eagle3.data.chat import prompt_row
from eagle3.data.conversations import BadRow, Conversation, Message
from eagle3.data.encode import Outcome, RowEncoder, Task, opening_key, tokens_key
from eagle3.data.files import Record
from eagle3.data.pool import EncoderPool
from eagle3.data.prepare import prepare_shards

WHOLE = Task("s", "", None, keep="answers")
PROMPT = Task("s", "", None, keep="script")


def outcome_of(
    tokenizer: PreTrainedTokenizerBase, row: dict[str, Any], task: Task = WHOLE, **settings: Any
) -> Outcome:
    excluded = frozenset(settings.pop("excluded", ()))
    (outcome,) = RowEncoder(tokenizer, DataConfig(**settings), excluded).encode(
        [Record("f, line 1", row)], task
    )
    return outcome


def test_shards_are_the_same_for_any_number_of_workers(
    tmp_path: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": f"p{i % 29}" * (i % 7 + 1), "response": "r" * (i % 11)} for i in range(60)
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "heldout.jsonl").write_text('{"prompt": "p3p3p3p3"}\n')
    train, heldout = (SourceConfig(path=str(tmp_path / name)) for name in ("train.jsonl", "heldout.jsonl"))
    monkeypatch.setattr(pool, "MAX_INLINE_ROWS", 0)
    monkeypatch.setattr(encode, "MAX_BATCH_ROWS", 7)
    others = set(multiprocessing.active_children())
    results = []
    for workers in (1, 2, 3):
        cfg = DataConfig(sources=[train], workers=workers, rows_per_shard=10, max_prompt_tokens=30)
        prepared = prepare_shards(heldout, tokenizer_dir, cfg, False, tmp_path / str(workers))
        results.append(([f.summary for f in prepared.shards], prepared.report))
    assert len(results[0][0]) > 2
    assert len(results[0][1]["dropped"]) > 2
    assert results[0] == results[1] == results[2]
    assert set(multiprocessing.active_children()) <= others


def test_a_worker_that_is_killed_is_an_error_that_says_so(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "MAX_INLINE_ROWS", 0)
    monkeypatch.setattr(encode, "MAX_BATCH_ROWS", 1)
    records = (Record("f", {"prompt": f"p{i}"}) for i in range(100_000))
    others = set(multiprocessing.active_children())
    with EncoderPool(RowEncoder(tokenizer, DataConfig(workers=2))) as processes:
        outcomes = processes.encode(records, PROMPT)
        next(outcomes)
        worker = (set(multiprocessing.active_children()) - others).pop()
        os.kill(worker.pid or 0, signal.SIGKILL)
        with pytest.raises(RuntimeError, match=r"killed from outside.*lower data\.workers"):
            deque(outcomes, maxlen=0)


CALL = {"role": "assistant", "tool_calls": [{"id": "1", "name": "f", "arguments": {}}]}
RESULT = {"role": "tool", "content": "7", "name": "f", "tool_call_id": "1"}


@pytest.mark.parametrize("task", [WHOLE, PROMPT, Task("s", "", None, keep="last_prompt")])
@pytest.mark.parametrize(
    "turns",
    [
        [CALL, {**RESULT, "name": "\ud800"}],
        [CALL, {**RESULT, "tool_call_id": "\ud800"}],
        [{**CALL, "tool_calls": [{"id": "\ud800", "name": "f", "arguments": {}}]}, RESULT],
        [{**CALL, "tool_calls": [{"name": "f", "arguments": {"\ud800": 1}}]}, RESULT],
        [{**CALL, "reasoning": "\ud800"}, RESULT],
    ],
)
def test_half_a_surrogate_pair_anywhere_drops_one_row_by_name(
    tokenizer: PreTrainedTokenizerBase, turns: list[dict[str, Any]], task: Task
) -> None:
    row = {"messages": [{"role": "user", "content": "Hi"}, *turns, {"role": "assistant", "content": "Yes"}]}
    outcome = outcome_of(tokenizer, row, task)
    assert (outcome.where, outcome.rows, outcome.reason) == ("f, line 1", [], "bad_unicode")


def test_half_a_surrogate_pair_in_a_call_of_the_targets_own_is_refused_before_the_tokenizer(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"city": "\ud800"}}}
    messages = [Message(role="user", content="Hi"), Message(role="assistant", content="", tool_calls=[call])]
    with pytest.raises(BadRow, match="half a surrogate pair"):
        prompt_row(tokenizer, Conversation(messages))


def test_a_message_that_quotes_half_a_surrogate_pair_can_be_written(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    call = {"role": "assistant", "tool_calls": [{"name": "\ud800", "arguments": "[1]"}]}
    outcome = outcome_of(tokenizer, {"messages": [{"role": "user", "content": "Hi"}, call]})
    assert outcome.reason == "bad_tool_call"
    assert outcome.message.encode().startswith(b"arguments of \\ud800")


def test_tokens_are_taken_as_they_are(tokenizer: PreTrainedTokenizerBase) -> None:
    row = {"input_ids": [5, 6, 7, 8, 9], "loss_mask": [0, 0, 1, 1, 0]}
    (made,) = outcome_of(tokenizer, row).rows
    assert (made.token_ids, made.loss_mask) == ([5, 6, 7, 8, 9], [False, False, True, True, False])
    (cut,) = outcome_of(tokenizer, row, max_tokens=4).rows
    assert cut.token_ids == [5, 6, 7, 8]
    assert outcome_of(tokenizer, row, max_tokens=4).is_cut


def test_the_prompt_of_tokens_ends_where_their_last_answer_begins(tokenizer: PreTrainedTokenizerBase) -> None:
    row = {"input_ids": [5, 6, 7, 8, 9, 4], "loss_mask": [0, 1, 0, 1, 1, 0]}
    (made,) = outcome_of(tokenizer, row, PROMPT).rows
    assert (made.token_ids, made.loss_mask) == ([5, 6, 7], [False] * 3)
    (made,) = outcome_of(tokenizer, {"input_ids": [5, 6], "loss_mask": [0, 0]}, PROMPT).rows
    assert made.token_ids == [5, 6]


@pytest.mark.parametrize(
    ("row", "settings", "reason"),
    [
        ({"input_ids": [5, 10**6, 7], "loss_mask": [0, 1, 1]}, {}, "bad_token_ids"),
        ({"input_ids": [5, 6, 7], "loss_mask": [0, 1, 0]}, {}, "empty_mask"),
        ({"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]}, {"max_prompt_tokens": 1}, "prompt_too_long"),
        (
            {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]},
            {"excluded": [tokens_key([5, 6])]},
            "in_heldout",
        ),
        ({"prompt": "Hi\n there", "response": "x"}, {"excluded": [opening_key(" hi THERE ")]}, "in_heldout"),
        ({"prompt": "a" * (5 << 20), "response": "x"}, {}, "row_too_large"),
        ({"prompt": "a \ud800", "response": "x"}, {}, "bad_unicode"),
        ({"prompt": float("nan"), "response": "x"}, {}, "not_text"),
        ({"messages": [[{"role": "user", "content": "x"}]]}, {}, "bad_turn"),
    ],
)
def test_a_row_that_cannot_be_used_is_dropped_with_its_reason(
    tokenizer: PreTrainedTokenizerBase, row: dict[str, Any], settings: dict[str, Any], reason: str
) -> None:
    outcome = outcome_of(tokenizer, row, **settings)
    assert (outcome.reason, outcome.rows) == (reason, [])
    assert outcome.message


def test_a_preset_that_does_not_fit_the_row_is_counted(tokenizer: PreTrainedTokenizerBase) -> None:
    outcome = outcome_of(tokenizer, {"prompt": "x"}, Task("s", "sharegpt", None, keep="script"))
    assert (outcome.reason, outcome.message) == ("failed", "KeyError: 'conversations'")
