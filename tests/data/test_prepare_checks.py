"""Rows that do not become token shards: what is dropped and counted, what is refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from eagle3.config.data import SourceConfig
from eagle3.data.conversations import Conversation
from tests.helpers.calls import render_prompt
from tests.helpers.tiny_tokenizer import train_tokenizer
from tests.helpers.workplace import CHAT, Workplace, all_rows, messages_of


def test_duplicates_are_dropped_and_counted(workplace: Workplace) -> None:
    rows = [
        {"id": 1, "prompt": "a"},
        {"prompt": "b"},
        {"id": 3, "prompt": "a"},
        {"prompt": "a", "response": "x"},
    ]
    prepared = workplace.prepare(rows)
    assert prepared.report["dropped"] == {"duplicate": 2}
    assert [r.sample_id for r in all_rows(prepared)] == [
        r.sample_id for r in all_rows(workplace.prepare(rows[:2]))
    ]


def test_equal_prompts_with_different_answers_are_not_duplicates(workplace: Workplace) -> None:
    rows = [{"prompt": "a", "response": "x"}, {"prompt": "a", "response": "y"}]
    assert workplace.prepare(rows, regenerate=False).report["rows_kept"] == 2


@pytest.mark.parametrize("regenerate", [True, False])
def test_training_rows_that_open_like_a_heldout_prompt_are_dropped_and_counted(
    workplace: Workplace, regenerate: bool
) -> None:
    rows = [{"prompt": "new", "response": "x"}, {"prompt": "a", "response": "x"}, CHAT]
    prepared = workplace.prepare(
        rows, regenerate, heldout=[{"prompt": " a\n"}, {"prompt": "one"}], max_dropped_share=0.7
    )
    assert prepared.report["dropped"] == {"in_heldout": 2}
    assert prepared.report["rows_kept"] == 1


def test_a_prompt_longer_than_the_limit_is_dropped_and_counted(
    workplace: Workplace, tokenizer: PreTrainedTokenizerBase
) -> None:
    limit = len(render_prompt(tokenizer, messages_of({"prompt": "aaa"})))
    rows = [{"prompt": "a" * n, "response": "b" * 50} for n in (1, 3, 4)]
    heldout = [{"prompt": "c" * n} for n in (1, 90)]
    for regenerate in (True, False):
        report = workplace.prepare(rows, regenerate, heldout, max_prompt_tokens=limit).report
        assert report["dropped"] == {"prompt_too_long": 1}
        assert report["heldout"]["dropped"] == {"prompt_too_long": 1}
        assert report["prompts"] == {"train": 2, "heldout": 1}


def test_long_rows_are_truncated_and_counted_and_empty_masks_dropped(
    workplace: Workplace, tokenizer: PreTrainedTokenizerBase
) -> None:
    num_prompt = len(render_prompt(tokenizer, messages_of({"prompt": "a"})))
    rows = [
        {"prompt": "a", "response": "xyz"},
        {"prompt": "a", "response": "x"},
        {"prompt": "aa", "response": "xyz"},
    ]
    prepared = workplace.prepare(rows, regenerate=False, max_tokens=num_prompt + 2)
    # "aa" is one token longer: only its first answer token fits, which no loss trains.
    assert prepared.report["dropped"] == {"empty_mask": 1}
    assert prepared.report["truncated"] == 1
    assert [r.loss_mask for r in all_rows(prepared)] == [[False] * num_prompt + [True, True]] * 2


def test_more_dropped_rows_than_allowed_is_an_error_with_counts_by_reason(workplace: Workplace) -> None:
    rows = [{"prompt": "a"}, {"prompt": "a"}, {"prompt": "b" * 90}, {"prompt": "held out"}]
    message = (
        "train.jsonl: 3 of 4 rows dropped (duplicate 1, prompt_too_long 1, in_heldout 1), "
        "more than data.max_dropped_share = 0.5; correct the source"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        workplace.prepare(rows, max_prompt_tokens=60)
    assert workplace.written() == []
    assert workplace.prepare(rows, max_prompt_tokens=60, max_dropped_share=0.75).report["rows_kept"] == 1


@pytest.mark.parametrize(
    ("num_rows", "settings", "message"),
    [
        (
            5,
            {"rows_per_shard": 4, "min_shards": 3},
            "5 usable rows of 5 fill 2 shards of data.rows_per_shard = 4, data.min_shards = 3 are required; "
            "add rows or lower data.rows_per_shard to 1 or data.min_shards",
        ),
        (
            2,
            {"rows_per_shard": 1, "min_shards": 3},
            "2 usable rows of 2 fill 2 shards of data.rows_per_shard = 1",
        ),
        (2, {"rows_per_shard": 1, "min_shards": 3}, "add rows or lower data.min_shards"),
    ],
)
def test_fewer_shards_than_required_is_an_error(
    workplace: Workplace, num_rows: int, settings: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as e:
        workplace.prepare([{"prompt": f"p{i}"} for i in range(num_rows)], **settings)
    assert str(e.value).startswith(str(workplace.root / "train.jsonl"))
    assert workplace.written() == []


def test_rows_dropped_later_count_for_the_shards_too(workplace: Workplace) -> None:
    rows = [{"prompt": f"p{i}"} for i in range(3)] + [{"prompt": "p0"}]
    assert workplace.prepare(rows, rows_per_shard=2, min_shards=2).report["rows_kept"] == 3
    with pytest.raises(
        ValueError,
        match=r"3 usable rows of 4 fill 3 shards of data\.rows_per_shard = 1, data\.min_shards = 4",
    ):
        workplace.prepare(rows, rows_per_shard=1, min_shards=4)


def test_the_suggested_shard_size_works(workplace: Workplace) -> None:
    for num_rows in range(3, 12):
        rows = [{"prompt": f"p{i}"} for i in range(num_rows)]
        with pytest.raises(ValueError, match="rows_per_shard to ") as e:
            workplace.prepare(rows, rows_per_shard=100, min_shards=3)
        size = int(re.findall(r"rows_per_shard to (\d+)", str(e.value))[0])
        assert len(workplace.prepare(rows, rows_per_shard=size, min_shards=3).shards) >= 3


@pytest.mark.parametrize("regenerate", [True, False])
def test_bad_rows_are_dropped_counted_and_shown(workplace: Workplace, regenerate: bool) -> None:
    rows: list[dict[str, Any]] = [{"prompt": f"p{i}", "response": "x"} for i in range(9)]
    heldout = [{"prompt": "a"}, {"prompt": "b"}, {"prompt": ""}]
    bad = [{"text": "?"}, {"prompt": 7, "response": "x"}, {"text": "!"}, {"text": "."}, {"text": ","}]
    prepared = workplace.prepare([*rows, *bad], regenerate, heldout, rows_per_shard=2)
    assert prepared.report["dropped"] == {"no_conversation": 4, "not_text": 1}
    assert prepared.report["heldout"]["dropped"] == {"empty_text": 1}
    assert all_rows(prepared) == all_rows(workplace.prepare(rows, regenerate, heldout, rows_per_shard=2))
    shown = prepared.report["sources"]["train.jsonl"]["examples"]
    assert [e["row"] for e in shown["no_conversation"]] == [f"train.jsonl, line {i}" for i in (10, 12, 13)]
    assert "only the keys ['text']" in shown["no_conversation"][0]["message"]


def test_a_row_that_the_template_refuses_is_dropped_counted_and_shown(tmp_path: Path) -> None:
    target = tmp_path / "target"
    template = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "{{ m['content'] }}<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>{% endif %}"
    )
    train_tokenizer(template).save_pretrained(str(target))
    system = {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}
    report = Workplace(tmp_path, target).prepare([{"prompt": "a"}, system]).report
    assert report["dropped"] == {"template_refuses": 1}
    (example,) = report["sources"]["train.jsonl"]["examples"]["template_refuses"]
    assert example["row"] == "train.jsonl, line 2"
    assert "no system role" in example["message"]


def test_rows_without_an_answer_are_dropped_where_nothing_regenerates_it(workplace: Workplace) -> None:
    assert workplace.prepare([CHAT, {"prompt": "a"}], regenerate=False).report["dropped"] == {"no_answer": 1}
    assert workplace.prepare([CHAT, {"prompt": "a"}], regenerate=True).report["rows_kept"] == 2
    message = r"1 of 1 rows dropped \(no_answer 1\).*line 1: no assistant text.*regenerate\.enabled"
    with pytest.raises(ValueError, match=message):
        workplace.prepare([{"prompt": "a"}], regenerate=False)


def test_a_row_that_breaks_a_template_in_an_unforeseen_way_does_not_end_the_run(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    from eagle3.data import encode

    def trip(tokenizer: Any, conversation: Conversation, thinking: bool | None) -> Any:
        return (
            1 / 0
            if conversation.messages[0]["content"] == "a"
            else prompt_row(tokenizer, conversation, thinking)
        )

    prompt_row = encode.prompt_row
    monkeypatch.setattr(encode, "prompt_row", trip)
    report = workplace.prepare([{"prompt": "a"}, {"prompt": "b"}]).report
    assert report["dropped"] == {"failed": 1}
    assert (
        report["sources"]["train.jsonl"]["examples"]["failed"][0]["message"]
        == "ZeroDivisionError: division by zero"
    )


def test_a_source_cut_off_in_the_middle_is_an_error_that_leaves_no_files(workplace: Workplace) -> None:
    path = workplace.root / "rows.json"
    path.write_text(json.dumps([{"prompt": f"p{i}"} for i in range(9)])[:-20])
    with pytest.raises(ValueError, match=r"rows\.json, row 8: not JSON"):
        workplace.prepare_sources([SourceConfig(path=str(path))], rows_per_shard=2)
    assert workplace.written() == []


def test_no_heldout_prompt_left_is_an_error(workplace: Workplace) -> None:
    message = r"heldout\.jsonl: none of 1 held-out prompts is left, .*'prompt_too_long': 1\}; raise data\.max"
    with pytest.raises(ValueError, match=message):
        workplace.prepare([{"prompt": "a"}], heldout=[{"prompt": "b" * 200}], max_prompt_tokens=60)
    assert workplace.written() == []
