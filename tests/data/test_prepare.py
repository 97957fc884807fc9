"""Token shards from source files: what they hold, what is dropped and counted, what is refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from eagle3.config import DataConfig
from eagle3.data.chat import conversation_rows, encode_rows, render_prompt
from eagle3.data.conversations import Conversation, Message, to_conversation
from eagle3.data.prepare import PreparedFiles, prepare_shards
from eagle3.shards import TokenRow, read_token_shard, summarise_rows
from tests.data.tiny import train_tokenizer

RECIPES = Path(__file__).parents[2] / "workflows" / "recipes"
HELDOUT = [{"prompt": "held out"}]
CHAT = {
    "messages": [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
        {"role": "assistant", "content": "four"},
    ]
}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


class Workplace:
    """A target directory and source files to prepare."""

    def __init__(self, root: Path, tokenizer_dir: Path) -> None:
        self.root, self.tokenizer_dir, self.out_dir = root, tokenizer_dir, root / "out"

    def prepare(
        self, rows: list[dict[str, Any]], regenerate: bool = True, heldout: list[dict[str, Any]] = HELDOUT, **settings: Any
    ) -> PreparedFiles:
        train_path = write_rows(self.root / "train.jsonl", rows)
        heldout_path = write_rows(self.root / "heldout.jsonl", heldout)
        return prepare_shards(train_path, heldout_path, self.tokenizer_dir, DataConfig(**settings), regenerate, self.out_dir)

    def written(self) -> list[str]:
        return sorted(p.name for p in self.out_dir.iterdir()) if self.out_dir.exists() else []


@pytest.fixture
def place(tmp_path: Path, tokenizer_dir: Path) -> Workplace:
    return Workplace(tmp_path, tokenizer_dir)


def messages_of(row: dict[str, Any]) -> list[Message]:
    conversation = to_conversation(row)
    assert isinstance(conversation, Conversation)
    return conversation.messages


def all_rows(prepared: PreparedFiles) -> list[TokenRow]:
    return [row for file in prepared.shards for row in read_token_shard(file.path)]


def test_regeneration_keeps_prompts_only(place: Workplace, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = all_rows(place.prepare([{"prompt": "a", "response": "b"}, CHAT]))
    asked = [messages_of({"prompt": "a"}), messages_of(CHAT)[:3]]
    assert [r.token_ids for r in rows] == [render_prompt(tokenizer, m) for m in asked]
    assert not any(any(r.loss_mask) for r in rows)


def test_without_regeneration_rows_are_whole_conversations(place: Workplace, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = all_rows(place.prepare([CHAT], regenerate=False))
    (expected,) = encode_rows(tokenizer, conversation_rows(tokenizer, Conversation(messages_of(CHAT))))
    assert [(r.token_ids, r.loss_mask) for r in rows] == [(expected.token_ids, expected.loss_mask)]


def test_heldout_rows_are_prompts_in_either_mode(place: Workplace, tokenizer: PreTrainedTokenizerBase) -> None:
    for regenerate in (True, False):
        prepared = place.prepare([CHAT], regenerate, heldout=[{"prompt": "a", "response": "b"}])
        (row,) = read_token_shard(prepared.heldout.path)
        assert row.token_ids == render_prompt(tokenizer, messages_of({"prompt": "a"}))
        assert not any(row.loss_mask)


def test_summaries_and_report_count_what_the_files_hold(place: Workplace) -> None:
    rows = [{"prompt": f"p{i}", "response": "r" * (i + 1)} for i in range(5)]
    prepared = place.prepare(rows, regenerate=False, rows_per_shard=2)
    assert [f.summary for f in prepared.shards] == [summarise_rows(read_token_shard(f.path)) for f in prepared.shards]
    assert place.written() == ["heldout.parquet", "shard-00000.parquet", "shard-00001.parquet", "shard-00002.parquet"]
    report = prepared.report
    kept = all_rows(prepared)
    assert (report["rows_read"], report["rows_kept"], report["dropped"], report["truncated"]) == (5, 5, {}, 0)
    assert report["tokens"] == sum(len(r.token_ids) for r in kept)
    assert report["supervised_tokens"] == sum(sum(r.loss_mask) for r in kept)
    assert report["prompts"] == {"train": 5, "heldout": 1}
    assert report["heldout"] == {"rows_read": 1, "dropped": {}}
    assert [s["sample_id"] for s in report["samples"]] == [r.sample_id for r in kept[:4]]
    assert report["samples"][0]["spans"][1] == ["r<|end|>", True]
    assert str(place.root) not in json.dumps(report)


def test_appended_rows_leave_earlier_shards_alone(place: Workplace) -> None:
    rows = [{"prompt": f"p{i}"} for i in range(7)]
    before = [f.summary.digest for f in place.prepare(rows, rows_per_shard=2).shards]
    after = [f.summary.digest for f in place.prepare([*rows, {"prompt": "p7"}, {"prompt": "p8"}], rows_per_shard=2).shards]
    assert len(before) == 4
    assert len(after) == 5
    assert after[:3] == before[:3]
    assert after[3] != before[3]


def test_digests_do_not_depend_on_where_the_files_lie(tmp_path: Path, tokenizer_dir: Path) -> None:
    digests = []
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        prepared = Workplace(tmp_path / name, tokenizer_dir).prepare([CHAT, {"prompt": "a", "id": name}])
        digests.append([f.summary.digest for f in [*prepared.shards, prepared.heldout]])
    assert digests[0] == digests[1]


def test_batches_do_not_show(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"prompt": f"p{i}", "response": "r" * (i + 1)} for i in range(7)]
    whole = all_rows(place.prepare(rows, regenerate=False))
    monkeypatch.setattr("eagle3.data.prepare.BATCH_ROWS", 3)
    assert all_rows(place.prepare(rows, regenerate=False)) == whole


def test_duplicates_are_dropped_and_counted(place: Workplace) -> None:
    rows = [{"id": 1, "prompt": "a"}, {"prompt": "b"}, {"id": 3, "prompt": "a"}, {"prompt": "a", "response": "x"}]
    prepared = place.prepare(rows)
    assert prepared.report["dropped"] == {"duplicate": 2}
    assert [r.sample_id for r in all_rows(prepared)] == [r.sample_id for r in all_rows(place.prepare(rows[:2]))]


def test_equal_prompts_with_different_answers_are_not_duplicates(place: Workplace) -> None:
    rows = [{"prompt": "a", "response": "x"}, {"prompt": "a", "response": "y"}]
    assert place.prepare(rows, regenerate=False).report["rows_kept"] == 2


@pytest.mark.parametrize("regenerate", [True, False])
def test_training_rows_that_open_like_a_heldout_prompt_are_dropped_and_counted(place: Workplace, regenerate: bool) -> None:
    rows = [{"prompt": "new", "response": "x"}, {"prompt": "a", "response": "x"}, CHAT]
    prepared = place.prepare(rows, regenerate, heldout=[{"prompt": " a\n"}, {"prompt": "one"}], max_dropped_share=0.7)
    assert prepared.report["dropped"] == {"in_heldout": 2}
    assert prepared.report["rows_kept"] == 1


def test_a_prompt_longer_than_the_limit_is_dropped_and_counted(place: Workplace, tokenizer: PreTrainedTokenizerBase) -> None:
    limit = len(render_prompt(tokenizer, messages_of({"prompt": "aaa"})))
    rows = [{"prompt": "a" * n, "response": "b" * 50} for n in (1, 3, 4)]
    heldout = [{"prompt": "c" * n} for n in (1, 90)]
    for regenerate in (True, False):
        report = place.prepare(rows, regenerate, heldout, max_prompt_tokens=limit).report
        assert report["dropped"] == {"prompt_too_long": 1}
        assert report["heldout"] == {"rows_read": 2, "dropped": {"prompt_too_long": 1}}
        assert report["prompts"] == {"train": 2, "heldout": 1}


def test_long_rows_are_truncated_and_counted_and_empty_masks_dropped(
    place: Workplace, tokenizer: PreTrainedTokenizerBase
) -> None:
    num_prompt = len(render_prompt(tokenizer, messages_of({"prompt": "a"})))
    rows = [{"prompt": "a", "response": "xyz"}, {"prompt": "a", "response": "x"}, {"prompt": "aa", "response": "xyz"}]
    prepared = place.prepare(rows, regenerate=False, max_tokens=num_prompt + 2)
    # "aa" is one token longer: only its first answer token fits, which no loss trains.
    assert prepared.report["dropped"] == {"empty_mask": 1}
    assert prepared.report["truncated"] == 1
    assert [r.loss_mask for r in all_rows(prepared)] == [[False] * num_prompt + [True, True]] * 2


def test_more_dropped_rows_than_allowed_is_an_error_with_counts_by_reason(place: Workplace) -> None:
    rows = [{"prompt": "a"}, {"prompt": "a"}, {"prompt": "b" * 90}, {"prompt": "held out"}]
    said = (
        "train.jsonl: 3 of 4 rows dropped (duplicate 1, in_heldout 1, prompt_too_long 1), "
        "more than data.max_dropped_share = 0.5; mend the source"
    )
    with pytest.raises(ValueError, match=re.escape(said)):
        place.prepare(rows, max_prompt_tokens=60)
    assert place.written() == []
    assert place.prepare(rows, max_prompt_tokens=60, max_dropped_share=0.75).report["rows_kept"] == 1


@pytest.mark.parametrize(
    ("num_rows", "settings", "said"),
    [
        (
            5,
            {"rows_per_shard": 4, "min_shards": 3},
            "5 usable rows of 5 fill 2 shards of data.rows_per_shard = 4, data.min_shards = 3 are required; "
            "add rows or lower data.rows_per_shard to 1 or data.min_shards",
        ),
        (2, {"rows_per_shard": 1, "min_shards": 3}, "2 usable rows of 2 fill 2 shards of data.rows_per_shard = 1"),
        (2, {"rows_per_shard": 1, "min_shards": 3}, "add rows or lower data.min_shards"),
    ],
)
def test_fewer_shards_than_required_is_an_error(place: Workplace, num_rows: int, settings: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as e:
        place.prepare([{"prompt": f"p{i}"} for i in range(num_rows)], **settings)
    assert str(e.value).startswith(str(place.root / "train.jsonl"))
    assert place.written() == []


def test_rows_dropped_later_count_for_the_shards_too(place: Workplace) -> None:
    rows = [{"prompt": f"p{i}"} for i in range(3)] + [{"prompt": "p0"}]
    assert place.prepare(rows, rows_per_shard=2, min_shards=2).report["rows_kept"] == 3
    with pytest.raises(ValueError, match=r"3 usable rows of 4 fill 3 shards of data\.rows_per_shard = 1, data\.min_shards = 4"):
        place.prepare(rows, rows_per_shard=1, min_shards=4)


def test_the_suggested_shard_size_works(place: Workplace) -> None:
    for num_rows in range(3, 12):
        rows = [{"prompt": f"p{i}"} for i in range(num_rows)]
        with pytest.raises(ValueError, match="rows_per_shard to ") as e:
            place.prepare(rows, rows_per_shard=100, min_shards=3)
        size = int(re.findall(r"rows_per_shard to (\d+)", str(e.value))[0])
        assert len(place.prepare(rows, rows_per_shard=size, min_shards=3).shards) >= 3


@pytest.mark.parametrize("regenerate", [True, False])
def test_a_bad_last_line_stops_everything_before_anything_is_written(place: Workplace, regenerate: bool) -> None:
    rows: list[dict[str, Any]] = [{"prompt": f"p{i}", "response": "x"} for i in range(6)]
    with pytest.raises(ValueError, match=r"train\.jsonl, line 7: no conversation"):
        place.prepare([*rows, {"text": "?"}], regenerate, rows_per_shard=2)
    assert place.written() == []
    with pytest.raises(ValueError, match=r"heldout\.jsonl, line 2: prompt is empty; fill it"):
        place.prepare(rows, regenerate, heldout=[{"prompt": "a"}, {"prompt": ""}])
    assert place.written() == []


def test_a_row_that_the_template_refuses_is_named_and_nothing_is_left_behind(tmp_path: Path) -> None:
    target = tmp_path / "target"
    template = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "{{ m['content'] }}<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>{% endif %}"
    )
    train_tokenizer(template).save_pretrained(str(target))
    place = Workplace(tmp_path, target)
    system = {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}
    with pytest.raises(ValueError, match=r"train\.jsonl, line 2: the chat template refuses .*no system role.*; change the row"):
        place.prepare([{"prompt": "a"}, system])
    assert place.written() == []


def test_rows_without_an_answer_are_refused_where_nothing_regenerates_it(place: Workplace) -> None:
    with pytest.raises(ValueError, match=r"train\.jsonl, line 2: no assistant text to train on; .*regenerate\.enabled"):
        place.prepare([CHAT, {"prompt": "a"}], regenerate=False)
    assert place.prepare([CHAT, {"prompt": "a"}], regenerate=True).report["rows_kept"] == 2


def test_no_heldout_prompt_left_is_an_error(place: Workplace) -> None:
    said = r"heldout\.jsonl: none of 1 held-out prompts is left, dropped \{'prompt_too_long': 1\}; raise data\.max_prompt_tokens"
    with pytest.raises(ValueError, match=said):
        place.prepare([{"prompt": "a"}], heldout=[{"prompt": "b" * 200}], max_prompt_tokens=60)
    assert place.written() == []


def test_shipped_prompts_are_all_kept_and_none_is_held_out_too(tmp_path: Path, tokenizer_dir: Path) -> None:
    cfg = DataConfig(rows_per_shard=100, min_shards=3)
    prepared = prepare_shards(RECIPES / "prompts.jsonl", RECIPES / "heldout.jsonl", tokenizer_dir, cfg, True, tmp_path)
    assert prepared.report["prompts"] == {"train": 300, "heldout": 24}
    assert prepared.report["dropped"] == prepared.report["heldout"]["dropped"] == {}
    train_ids = {r.sample_id for r in all_rows(prepared)}
    assert not train_ids & {r.sample_id for r in read_token_shard(prepared.heldout.path)}
