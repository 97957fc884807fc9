"""Token shards from source files: what they hold."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from eagle3.config.data import DataConfig, SourceConfig
from eagle3.data.chat import conversation_rows, encode_rows
from eagle3.data.conversations import Conversation
from eagle3.data.prepare import prepare_shards
from eagle3.data.script import Script
from eagle3.shards.tokens import read_token_shard, summarise_rows
from tests.helpers.calls import render_prompt
from tests.helpers.workplace import CHAT, Workplace, all_rows, messages_of, write_rows

RECIPES = Path(__file__).parents[2] / "workflows" / "recipes"


def test_regeneration_keeps_first_prompts_and_the_users_further_turns(
    workplace: Workplace, tokenizer: PreTrainedTokenizerBase
) -> None:
    rows = all_rows(workplace.prepare([{"prompt": "a", "response": "b"}, CHAT]))
    asked = [messages_of({"prompt": "a"}), messages_of(CHAT)[:1]]
    assert [r.token_ids for r in rows] == [render_prompt(tokenizer, m) for m in asked]
    assert not any(any(r.loss_mask) for r in rows)
    assert rows[0].script == ""
    assert Script.from_json(rows[1].script).turns == [[messages_of(CHAT)[2]]]


def test_heldout_prompts_are_last_turns_after_their_own_history(
    workplace: Workplace, tokenizer: PreTrainedTokenizerBase
) -> None:
    prepared = workplace.prepare([{"prompt": "a"}], heldout=[CHAT])
    (row,) = read_token_shard(prepared.heldout.path)
    assert (row.token_ids, row.script) == (render_prompt(tokenizer, messages_of(CHAT)[:3]), "")


def test_half_a_surrogate_pair_drops_its_row_alone_in_training_and_heldout_files(
    workplace: Workplace,
) -> None:
    call = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {}}]}
    result = {"role": "tool", "name": "\ud800", "content": "7"}
    bad = {"messages": [{"role": "user", "content": "Hi"}, call, result]}
    prepared = workplace.prepare(
        [bad, {"prompt": "a"}, {"prompt": "b"}], heldout=[bad, CHAT, {"prompt": "q"}]
    )
    assert len(all_rows(prepared)) == 2
    for counts in (prepared.report, prepared.report["heldout"]):
        assert counts["dropped"]["bad_unicode"] == 1


def test_rows_that_offer_tools_fill_shards_of_their_own(workplace: Workplace) -> None:
    tool = {"name": "weather", "parameters": {"type": "object"}}
    rows = [{"prompt": f"{word}?", "tools": [tool] if i % 2 else None} for i, word in enumerate("abcdefgh")]
    prepared = workplace.prepare(rows, rows_per_shard=3, min_shards=4)
    assert (
        [file.summary.rows for file in prepared.shards]
        == [file.summary.rows for file in prepared.tool_tasks]
        == [3, 1]
    )
    assert prepared.report["prompts"]["train"] == 8
    assert {row.script for row in all_rows(prepared)} == {""}
    scripts = [
        Script.from_json(row.script) for file in prepared.tool_tasks for row in read_token_shard(file.path)
    ]
    assert [script.messages[0]["content"] for script in scripts] == ["b?", "d?", "f?", "h?"]
    whole = workplace.prepare([{**row, "response": "x"} for row in rows], regenerate=False, rows_per_shard=3)
    assert (len(whole.shards), whole.tool_tasks) == (3, [])


def test_without_regeneration_rows_are_whole_conversations(
    workplace: Workplace, tokenizer: PreTrainedTokenizerBase
) -> None:
    rows = all_rows(workplace.prepare([CHAT], regenerate=False))
    (expected,) = encode_rows(tokenizer, conversation_rows(tokenizer, Conversation(messages_of(CHAT))))
    assert [(r.token_ids, r.loss_mask) for r in rows] == [(expected.token_ids, expected.loss_mask)]


def test_heldout_rows_are_prompts_in_either_mode(
    workplace: Workplace, tokenizer: PreTrainedTokenizerBase
) -> None:
    for regenerate in (True, False):
        prepared = workplace.prepare([CHAT], regenerate, heldout=[{"prompt": "a", "response": "b"}])
        (row,) = read_token_shard(prepared.heldout.path)
        assert row.token_ids == render_prompt(tokenizer, messages_of({"prompt": "a"}))
        assert not any(row.loss_mask)


def test_summaries_and_report_count_what_the_files_hold(workplace: Workplace) -> None:
    rows = [{"prompt": f"p{i}", "response": "r" * (i + 1)} for i in range(5)]
    prepared = workplace.prepare(rows, regenerate=False, rows_per_shard=2)
    assert [f.summary for f in prepared.shards] == [
        summarise_rows(read_token_shard(f.path)) for f in prepared.shards
    ]
    assert workplace.written() == [
        "heldout.parquet",
        "shard-00000.parquet",
        "shard-00001.parquet",
        "shard-00002.parquet",
    ]
    report = prepared.report
    kept = all_rows(prepared)
    assert (report["rows_read"], report["rows_kept"], report["dropped"], report["truncated"]) == (5, 5, {}, 0)
    assert report["tokens"] == sum(len(r.token_ids) for r in kept)
    assert report["supervised_tokens"] == sum(sum(r.loss_mask) for r in kept)
    assert report["prompts"] == {"train": 5, "heldout": 1}
    assert (report["heldout"]["rows_read"], report["heldout"]["dropped"]) == (1, {})
    assert [s["sample_id"] for s in report["samples"]] == [r.sample_id for r in kept[:2]]
    assert report["samples"][0]["spans"][1] == ["r<|end|>", True]
    assert str(workplace.root) not in json.dumps(report)


def test_appended_rows_leave_earlier_shards_alone(workplace: Workplace) -> None:
    rows = [{"prompt": f"p{i}"} for i in range(7)]
    before = [f.summary.digest for f in workplace.prepare(rows, rows_per_shard=2).shards]
    after = [
        f.summary.digest
        for f in workplace.prepare([*rows, {"prompt": "p7"}, {"prompt": "p8"}], rows_per_shard=2).shards
    ]
    assert len(before) == 4
    assert len(after) == 5
    assert after[:3] == before[:3]
    assert after[3] != before[3]


def test_digests_do_not_depend_on_where_the_files_are(tmp_path: Path, tokenizer_dir: Path) -> None:
    digests = []
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        prepared = Workplace(tmp_path / name, tokenizer_dir).prepare([CHAT, {"prompt": "a", "id": name}])
        digests.append([f.summary.digest for f in [*prepared.shards, prepared.heldout]])
    assert digests[0] == digests[1]


def test_batches_do_not_change_rows(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"prompt": f"p{i}", "response": "r" * (i + 1)} for i in range(7)]
    whole = all_rows(workplace.prepare(rows, regenerate=False))
    monkeypatch.setattr("eagle3.data.encode.MAX_BATCH_ROWS", 3)
    assert all_rows(workplace.prepare(rows, regenerate=False)) == whole


def test_shipped_prompts_are_all_kept_and_none_is_held_out_too(tmp_path: Path, tokenizer_dir: Path) -> None:
    train, heldout = (SourceConfig(path=str(RECIPES / name)) for name in ("prompts.jsonl", "heldout.jsonl"))
    cfg = DataConfig(sources=[train], rows_per_shard=100, min_shards=3)
    prepared = prepare_shards(heldout, tokenizer_dir, cfg, True, tmp_path)
    assert prepared.report["prompts"] == {"train": 300, "heldout": 24}
    assert prepared.report["dropped"] == prepared.report["heldout"]["dropped"] == {}
    train_ids = {r.sample_id for r in all_rows(prepared)}
    assert not train_ids & {r.sample_id for r in read_token_shard(prepared.heldout.path)}


class TestSeveralSources:
    """Order, weights, caps and duplicates over sources "a", "b" and "c" with prompts a0, a1, …"""

    @pytest.fixture
    def sources(self, workplace: Workplace) -> Any:
        def make(num_rows: dict[str, int], **settings: Any) -> list[SourceConfig]:
            made = []
            for name, rows in num_rows.items():
                path = write_rows(
                    workplace.root / f"{name}.jsonl",
                    [{"prompt": f"{name}{i}", "response": "x"} for i in range(rows)],
                )
                made.append(
                    SourceConfig(path=str(path), name=name, **{k: v[name] for k, v in settings.items()})
                )
            return made

        return make

    def test_without_weights_each_source_fills_shards_of_its_own(
        self, workplace: Workplace, sources: Any
    ) -> None:
        prepared = workplace.prepare_sources(sources({"a": 3, "b": 2, "c": 1}), rows_per_shard=2)
        assert [[r.source for r in read_token_shard(f.path)] for f in prepared.shards] == [
            ["a", "a"],
            ["a"],
            ["b", "b"],
            ["c"],
        ]
        statistics = prepared.report["sources"]
        assert {name: statistics[name]["rows_kept"] for name in statistics} == {"a": 3, "b": 2, "c": 1}
        before = [f.summary.digest for f in prepared.shards]
        after = [
            f.summary.digest
            for f in workplace.prepare_sources(sources({"a": 4, "b": 2, "c": 1}), rows_per_shard=2).shards
        ]
        assert (before[0], before[2:]) == (after[0], after[2:])

    def test_weights_are_shares_of_the_rows_until_a_source_is_used_up(
        self, workplace: Workplace, sources: Any
    ) -> None:
        made = sources({"a": 400, "b": 400, "c": 400}, weight={"a": 6, "b": 3, "c": 1})
        prepared = workplace.prepare_sources(made)
        names = [r.source for r in all_rows(prepared)]
        assert names.count("a") == 400
        assert 160 < names.count("b") < 240
        assert 45 < names.count("c") < 90
        assert prepared.report["sources"]["c"]["rows_read"] == names.count("c")
        shares = [names[:330].count(name) / 330 for name in "abc"]
        assert all(abs(share - wanted) < 0.1 for share, wanted in zip(shares, (0.6, 0.3, 0.1), strict=True))

    def test_a_mix_depends_on_the_seed_and_not_on_rows_appended(
        self, workplace: Workplace, sources: Any
    ) -> None:
        def ids(num_a: int, seed: int) -> list[str]:
            made = sources({"a": num_a, "b": 60}, weight={"a": 1, "b": 1})
            return [r.sample_id for r in all_rows(workplace.prepare_sources(made, seed=seed))]

        first, longer = ids(20, 0), ids(30, 0)
        assert first == ids(20, 0) != ids(20, 1)
        assert longer[: len(first)] == first
        assert len(longer) > len(first)

    def test_a_cap_counts_the_rows_that_are_kept(self, workplace: Workplace) -> None:
        rows = [{"prompt": "a"}, {"prompt": "a"}, {"prompt": ""}, {"prompt": "b"}, {"prompt": "c"}]
        source = SourceConfig(path=str(write_rows(workplace.root / "rows.jsonl", rows)), max_rows=2)
        prepared = workplace.prepare_sources([source])
        assert prepared.report["rows_kept"] == 2
        assert prepared.report["dropped"] == {"duplicate": 1, "empty_text": 1}
        assert prepared.report["rows_read"] == 4

    def test_a_row_that_another_source_had_is_a_duplicate(self, workplace: Workplace, sources: Any) -> None:
        a, b = sources({"a": 3, "b": 3})
        both = write_rows(workplace.root / "both.jsonl", [{"prompt": p} for p in ("a1", "new", "newer")])
        report = workplace.prepare_sources([a, SourceConfig(path=str(both), name="both"), b]).report
        assert report["sources"]["both"]["dropped"] == {"duplicate": 1}
        assert report["rows_kept"] == 8

    def test_one_source_may_keep_its_own_answers(self, workplace: Workplace, sources: Any) -> None:
        made = sources({"a": 1, "b": 1}, regenerate={"a": True, "b": False})
        a, b = all_rows(workplace.prepare_sources(made, regenerate=True))
        assert (any(a.loss_mask), any(b.loss_mask)) == (False, True)

    def test_one_source_that_is_mostly_dropped_is_an_error_however_large_the_others(
        self, workplace: Workplace, sources: Any
    ) -> None:
        bad = write_rows(workplace.root / "bad.jsonl", [{"text": "?"}, {"prompt": "x"}, {"text": "?"}])
        with pytest.raises(ValueError, match=r"bad\.jsonl: 2 of 3 rows dropped \(no_conversation 2\)"):
            workplace.prepare_sources([*sources({"a": 50}), SourceConfig(path=str(bad))])

    def test_weights_for_some_sources_only_are_an_error(self, workplace: Workplace, sources: Any) -> None:
        with pytest.raises(
            ValueError, match=r"all sources must have a weight above 0, or none, got none for b; add it"
        ):
            workplace.prepare_sources(sources({"a": 1, "b": 1}, weight={"a": 1, "b": 0}))

    def test_two_sources_of_one_name_are_an_error(self, workplace: Workplace, sources: Any) -> None:
        (a,) = sources({"a": 1})
        with pytest.raises(ValueError, match=r"a name of its own, got a twice; set `name`"):
            workplace.prepare_sources([a, a])


def test_prompts_of_further_evaluation_sets_are_kept_out_too(workplace: Workplace) -> None:
    path = write_rows(workplace.root / "bench.jsonl", [{"question": "What is  one\nand two?"}])
    rows = [{"prompt": "what is ONE and two?"}, {"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}]
    later = {
        "messages": [
            {"role": "user", "content": "d"},
            {"role": "assistant", "content": "e"},
            *CHAT["messages"][2:],
        ]
    }
    later["messages"][2] = {"role": "user", "content": "What is one and two?"}
    prepared = workplace.prepare([*rows, later], excluded=[SourceConfig(path=str(path))])
    assert prepared.report["dropped"] == {"in_heldout": 2}
    assert prepared.report["prompts"] == {"train": 3, "heldout": 1}


def test_a_conversation_and_its_beginning_have_one_opening(workplace: Workplace) -> None:
    rows = all_rows(
        workplace.prepare(
            [CHAT, {"messages": CHAT["messages"][:2]}, {"prompt": "other", "response": "x"}], False
        )
    )
    openings = [r.sample_id.partition(":")[0] for r in rows]
    assert openings[0] == openings[1] != openings[2]
    assert len({r.sample_id for r in rows}) == 3
