"""A shard's conversations with a target that answers by a rule, with kills between any two answers."""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import fsspec
import pytest

from eagle3.config.engine import RegenerateConfig, SamplingConfig
from eagle3.data.chat import encode_rows, prompt_row
from eagle3.data.conversations import Conversation
from eagle3.data.script import script_of
from eagle3.regenerate import answer_log
from eagle3.regenerate.answer_log import AnswerLog
from eagle3.regenerate.answers import Answer, Request, Sampling
from eagle3.regenerate.generator import AnswerGenerator, check_any_left, outcomes_text, warn_of_limit
from eagle3.shards.tokens import TokenRow, read_token_shard, write_token_shard
from tests.helpers.conversations import MULTI, WEATHER, assistant, user
from tests.helpers.formats import FORMATS

CFG = RegenerateConfig(temperature=0.0, max_new_tokens=20)
DONE = TokenRow("done:0", "other", [5, 6, 7], [False, True, True])


class Killed(Exception):
    """In place of `kill -9`: only what the process wrote is left."""


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    tokenizer = FORMATS["smollm2"].tokenizer()
    tokenizer.save_pretrained(path)
    (path / "config.json").write_text(f'{{"eos_token_id": {tokenizer.eos_token_id}}}')
    return path


@pytest.fixture(params=["directory", "store"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "directory":
        yield str(tmp_path / "log")
        return
    yield f"memory://log-{tmp_path.name}"
    fsspec.filesystem("memory").store.clear()


def chat(*turns: str) -> Conversation:
    messages = [m for turn in turns for m in (user(turn), assistant("the source's answer"))]
    return Conversation(messages[:-1])


def shard_rows() -> list[TokenRow]:
    tokenizer = FORMATS["smollm2"].tokenizer()
    rows = []
    for i, conversation in enumerate(
        [chat("Hi"), chat("Hi", "Bye"), chat("One", "two", "three"), chat("Ho")]
    ):
        script = script_of(conversation, None)
        ids = encode_rows(tokenizer, [prompt_row(tokenizer, Conversation(script.messages))])[0].token_ids
        rows.append(
            TokenRow(f"o{i}:c", "chats", ids, [False] * len(ids), script.to_json() if script.has_more else "")
        )
    return [*rows[:2], DONE, *rows[2:]]


def own_words(prompt: list[int]) -> Answer:
    """This target's answer to a prompt: a word that depends on all of it."""
    ids = FORMATS["smollm2"].tokenizer()(f"Number {sum(prompt) % 997}<|im_end|>", add_special_tokens=False)[
        "input_ids"
    ]
    return Answer(ids, "stop")


def generate(
    target_dir: Path, uri: str, kill_after: int = 10**6, cfg: RegenerateConfig = CFG
) -> tuple[AnswerGenerator, list[list[int]]]:
    """Answer the shard, with so many answers before the kill; also returns the prompts that were asked."""
    asked: list[list[int]] = []
    with AnswerLog(uri) as log:
        generator = AnswerGenerator(shard_rows(), str(target_dir), cfg, 512, log)
        running = generator.start()
        while running:
            if len(asked) == kill_after:
                raise Killed
            i = min(running, key=lambda i: (len(running[i].prompt), i))
            asked.append(running[i].prompt)
            following = generator.follow(i, own_words(running.pop(i).prompt))
            if following:
                running[i] = following
    return generator, asked


def test_rows_keep_their_order_and_rows_with_answers_are_unchanged(target_dir: Path, tmp_path: Path) -> None:
    generator, asked = generate(target_dir, str(tmp_path / "log"))
    rows, counts = generator.result()
    assert [row.sample_id for row in rows] == ["o0:c", "o1:c", "done:0", "o2:c", "o3:c"]
    assert rows[2] is DONE
    assert not any(row.script for row in rows)
    assert len(asked) == 7
    assert counts == {"conversations": 4, "requested": 7, "answered": 7}
    assert (generator.num_turns_done, generator.num_turns) == (7, 7)
    # Every answer is the target's to its own history, and is supervised.
    for row in rows[:2]:
        begin = row.loss_mask.index(True)
        answer = own_words(row.token_ids[:begin]).token_ids
        assert row.token_ids[begin : begin + len(answer)] == answer


@pytest.mark.parametrize("killed_after", range(8))
def test_after_a_kill_only_what_is_missing_is_asked(
    target_dir: Path, tmp_path: Path, killed_after: int, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_log, "FLUSH_EVERY_S", 0.0)
    whole, asked = generate(target_dir, str(tmp_path / "other"))
    # Leaving the log's context would write what a killed process does not.
    monkeypatch.setattr(AnswerLog, "__exit__", lambda *args: None)
    with suppress(Killed):
        generate(target_dir, uri, killed_after)
    again, asked_again = generate(target_dir, uri)
    assert again.result() == whole.result()
    assert asked_again == asked[killed_after:]
    assert (again.num_turns_done, again.num_turns) == (7, 7)
    assert generate(target_dir, uri)[1] == []


def test_two_attempts_at_once_lose_nothing(target_dir: Path, tmp_path: Path, uri: str) -> None:
    first, second = AnswerLog(uri), AnswerLog(uri)
    with first, second:
        for number, log in enumerate((first, second, first)):
            log.add(number, 0, [1, number], Answer([7, number], "stop"))
    found = AnswerLog(uri)
    assert [found.find(i, 0, [1, i]) for i in range(3)] == [Answer([7, i], "stop") for i in range(3)]


def test_the_log_writes_its_answers_after_an_error(target_dir: Path, uri: str) -> None:
    with pytest.raises(Killed):  # here an error, not a kill: the context is left
        generate(target_dir, uri, 3)
    assert len(generate(target_dir, uri)[1]) == 4


def test_a_line_that_was_cut_off_is_asked_again(
    target_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole, _ = generate(target_dir, str(tmp_path / "log"))
    (file,) = (tmp_path / "log").glob("answers-*.jsonl")
    file.write_bytes(file.read_bytes()[:-9])
    again, asked = generate(target_dir, str(tmp_path / "log"))
    assert len(asked) == 1
    assert "cut off is asked for again" in caplog.text
    assert again.result() == whole.result()


@pytest.mark.parametrize(
    "broken",
    [
        b"\xff\x00\x9f",
        b"\0" * 99,
        b"[" * 100_000,
        b"{}",
        b"[[], 0, 1, [], 2]",
        b'[0, 0, "KEY", null, ""]',
        b'[0, 0, "KEY", ["a"], ""]',
    ],
)
def test_a_line_that_a_broken_disk_changed_is_asked_again(
    target_dir: Path, tmp_path: Path, broken: bytes
) -> None:
    whole, asked = generate(target_dir, str(tmp_path / "log"))
    (file,) = (tmp_path / "log").glob("answers-*.jsonl")
    lines = file.read_bytes().splitlines()
    key = json.loads(lines[0])[2].encode()
    file.write_bytes(b"\n".join([broken.replace(b"KEY", key), *lines[1:]]))
    again, asked_again = generate(target_dir, str(tmp_path / "log"))
    assert asked_again == asked[:1]
    assert again.result() == whole.result()


def test_answers_to_other_prompts_are_not_taken(target_dir: Path, tmp_path: Path) -> None:
    log = AnswerLog(str(tmp_path / "log"))
    log.add(0, 0, [1, 2, 3], Answer([4, 5], "stop"))
    assert AnswerLog(str(tmp_path / "log")).find(0, 0, [1, 2, 3]) == Answer([4, 5], "stop")
    assert AnswerLog(str(tmp_path / "log")).find(0, 0, [1, 2, 4]) is None
    assert len(generate(target_dir, str(tmp_path / "log"))[1]) == 7


def test_tools_need_a_parser_and_a_template_that_shows_them(target_dir: Path, tmp_path: Path) -> None:
    script = script_of(Conversation([user("Hi")], [WEATHER]), None)
    row = TokenRow("o:c", "chats", [5, 6], [False, False], script.to_json())
    log = AnswerLog(str(tmp_path / "log"))
    with pytest.raises(ValueError, match=r"regenerate\.tool_parser, got none"):
        AnswerGenerator([row], str(target_dir), CFG, 512, log)
    cfg = RegenerateConfig(tool_parser="hermes")
    with pytest.raises(
        ValueError, match=r"chat template must show tools, .* weather; give target\.chat_template"
    ):
        AnswerGenerator([row], str(target_dir), cfg, 512, log)


def test_each_source_has_its_own_sampling(target_dir: Path, tmp_path: Path) -> None:
    own = {"chats": SamplingConfig(temperature=0.0, max_new_tokens=9)}
    cfg = RegenerateConfig(temperature=0.8, top_p=0.9, max_new_tokens=20, sources=own)
    rows = [*shard_rows(), TokenRow("p:0", "plain", [5, 6], [False, False])]
    requests = AnswerGenerator(rows, str(target_dir), cfg, 512, AnswerLog(str(tmp_path))).start()
    assert {i: request.sampling for i, request in requests.items()} == {
        **dict.fromkeys((0, 1, 3, 4), Sampling(0.0, 0.9, 9)),
        5: Sampling(0.8, 0.9, 20),
    }
    assert requests[5] == Request([5, 6], Sampling(0.8, 0.9, 20))


def test_without_a_row_left_the_error_has_the_counts_and_a_remedy(target_dir: Path, tmp_path: Path) -> None:
    generator = AnswerGenerator(
        [row for row in shard_rows() if row is not DONE], str(target_dir), CFG, 512, AnswerLog(str(tmp_path))
    )
    for i in generator.start():
        assert generator.follow(i, Answer([0], "length")) is None
    message = (
        r"7 user turns requested = 0 answered \+ 4 failed \(too_short 4\) \+ 3 skipped .*; raise regenerate\."
    )
    rows, counts = generator.result()
    with pytest.raises(ValueError, match=message):
        check_any_left(len(rows), counts)
    check_any_left(1, counts)


def test_a_script_survives_the_token_shard(tmp_path: Path) -> None:
    rows = shard_rows()
    summary = write_token_shard(tmp_path / "shard.parquet", rows)
    assert read_token_shard(tmp_path / "shard.parquet") == rows
    other = [
        TokenRow(r.sample_id, r.source, r.token_ids, r.loss_mask, r.script.replace("Bye", "Buy"))
        for r in rows
    ]
    assert write_token_shard(tmp_path / "other.parquet", other).digest != summary.digest


def test_the_outcome_counts_add_up_in_words(caplog: pytest.LogCaptureFixture) -> None:
    counts = {
        "conversations": 3,
        "requested": 9,
        "answered": 5,
        "failed": 2,
        "failed: too_short": 1,
        "failed: no_room": 1,
    }
    counts |= {"skipped": 2, "tool_calls": 4, "at_length_limit": 1}
    assert outcomes_text(counts) == (
        "3 conversations, 9 user turns requested = 5 answered + 2 failed (no_room 1, too_short 1) "
        "+ 2 skipped after those; 4 tool calls"
    )
    warn_of_limit(counts, "shard 0")
    assert caplog.text == ""
    warn_of_limit(counts | {"at_length_limit": 2}, "shard 0")
    assert (
        "shard 0: 2 answers to 9 user turns ended at the length limit; raise regenerate.max_new_tokens"
        in caplog.text
    )


def test_a_script_has_every_message_but_the_answers() -> None:
    script = script_of(Conversation(MULTI), None)
    assert script.messages == MULTI[:1]
    assert script.turns == [[MULTI[2]]]
    greeted = script_of(Conversation([assistant("Welcome."), *MULTI]), None)
    assert greeted.messages == [assistant("Welcome."), MULTI[0]]
    assert not script_of(Conversation(MULTI[:2]), None).has_more
