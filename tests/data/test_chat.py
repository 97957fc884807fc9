"""Boundaries and masks of chat turns."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerBase

from eagle3.data.chat import (
    EncodedRow,
    conversation_rows,
    encode_rows,
    load_chat_tokenizer,
    prompt_row,
    text_spans,
)
from eagle3.data.conversations import BadRow, Conversation, Message
from eagle3.data.template import Piece
from tests.helpers.calls import call, render_prompt, tool
from tests.helpers.tiny_tokenizer import CHATML, train_tokenizer

CONTROL = ("<|pad|>", "<|start|>", "<|end|>")
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
TRICKY_TEXT = st.sampled_from(
    ["\n", " ", "\n\n  Hello", "<|end|", "|start|>", "assistant", "e\u0301", "👩‍👩‍👧", "\ufeff", "Help.\n"]
)
CONTENT = (ANY_TEXT | TRICKY_TEXT).filter(lambda text: not any(token in text for token in CONTROL))


def turn(role: str, content: str) -> Message:
    return Message(role=role, content=content)


def decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def encode(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], max_tokens: int | None = None
) -> EncodedRow:
    (row,) = encode_rows(tokenizer, conversation_rows(tokenizer, Conversation(messages)), max_tokens)
    return row


def supervised_runs(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> list[str]:
    row = encode(tokenizer, messages)
    return [text for text, supervised in text_spans(tokenizer, row.token_ids, row.loss_mask) if supervised]


def test_mask_of_a_short_conversation_by_hand(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [
        turn("system", "x"),
        turn("user", "a"),
        turn("assistant", "b"),
        turn("user", "c"),
        turn("assistant", "d"),
    ]
    ids, mask, num_cut, reason = encode(tokenizer, messages)
    assert (num_cut, reason) == (0, "")
    assert text_spans(tokenizer, ids, mask) == [
        ("<|start|>system\nx<|end|>\n<|start|>user\na<|end|>\n<|start|>assistant\n", False),
        ("b<|end|>", True),
        ("\n<|start|>user\nc<|end|>\n<|start|>assistant\n", False),
        ("d<|end|>", True),
    ]
    b, end, d = (tokenizer.convert_tokens_to_ids(t) for t in ("b", "<|end|>", "d"))
    assert [t for t, m in zip(ids, mask, strict=True) if m] == [b, end, d, end]


def test_turns_after_the_last_answer_are_cut_off(tokenizer: PreTrainedTokenizerBase) -> None:
    answered = [turn("user", "a"), turn("assistant", "b")]
    assert encode(tokenizer, [*answered, turn("user", "c")]) == encode(tokenizer, answered)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(CONTENT, CONTENT), min_size=1, max_size=3), st.none() | CONTENT)
def test_mask_is_exactly_the_assistants_words_and_end_of_turn(
    tokenizer: PreTrainedTokenizerBase, exchanges: list[tuple[str, str]], system: str | None
) -> None:
    messages = [turn("system", system)] if system is not None else []
    for asked, answered in exchanges:
        messages += [turn("user", asked), turn("assistant", answered)]
    ids, mask = encode(tokenizer, messages)[:2]
    assert supervised_runs(tokenizer, messages) == [answered + "<|end|>" for _, answered in exchanges]
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    assert decode(tokenizer, ids) + "\n" == whole
    first = messages[: next(i for i, m in enumerate(messages) if m["role"] == "assistant")]
    prompt = render_prompt(tokenizer, first)
    assert ids[: len(prompt)] == prompt
    assert mask[: len(prompt) + 1] == [False] * len(prompt) + [True]


def test_an_answer_that_would_merge_with_the_generation_prompt_keeps_its_own_tokens(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    messages = [turn("user", "a"), turn("assistant", "\n  Hello")]
    merged = tokenizer(tokenizer.apply_chat_template(messages, tokenize=False), add_special_tokens=False)[
        "input_ids"
    ]
    prompt = render_prompt(tokenizer, messages[:1])
    assert merged[: len(prompt)] != prompt, "the case does not occur with this tokenizer"
    assert supervised_runs(tokenizer, messages) == ["\n  Hello<|end|>"]


def test_a_batch_equals_one_by_one(tokenizer: PreTrainedTokenizerBase) -> None:
    conversations = [[turn("user", "a" * n), turn("assistant", "b<|end " * n)] for n in (1, 7, 30)]
    batch = encode_rows(
        tokenizer, [row for m in conversations for row in conversation_rows(tokenizer, Conversation(m))]
    )
    assert batch == [encode(tokenizer, m) for m in conversations]
    assert encode_rows(tokenizer, []) == []


def test_pieces_begin_where_answers_begin(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [turn("user", "a"), turn("assistant", "b"), turn("user", "c"), turn("assistant", "d")]
    assert conversation_rows(tokenizer, Conversation(messages)) == [
        [
            Piece("<|start|>system\nHelp.<|end|>\n<|start|>user\na<|end|>\n<|start|>assistant\n", 0),
            Piece("b<|end|>\n<|start|>user\nc<|end|>\n<|start|>assistant\n", len("b<|end|>")),
            Piece("d<|end|>", len("d<|end|>")),
        ]
    ]


TAG = "say <|end|>"
PLAIN = [turn("user", "a"), turn("assistant", "b")]


@pytest.mark.parametrize(
    "conversation",
    [
        Conversation([turn("system", TAG), *PLAIN]),
        Conversation([turn("user", TAG), PLAIN[1]]),
        Conversation([PLAIN[0], turn("assistant", TAG)]),
        Conversation([PLAIN[0], Message(role="assistant", content="b", reasoning_content=TAG)]),
        Conversation([PLAIN[0], PLAIN[1], turn("tool", TAG), PLAIN[1]]),
        Conversation(
            [PLAIN[0], Message(role="assistant", content="", tool_calls=[call("f", text=[{TAG: 1}])])]
        ),
        Conversation(PLAIN, [tool(TAG)]),
    ],
)
def test_a_text_that_spells_a_control_token_is_refused(
    tokenizer: PreTrainedTokenizerBase, conversation: Conversation
) -> None:
    for render in (conversation_rows, prompt_row):
        with pytest.raises(BadRow, match=r"spells the control token <\|end\|>; remove it") as e:
            render(tokenizer, conversation)
        assert e.value.reason == "control_token"


def test_a_greeting_before_the_first_user_turn_is_context(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [turn("assistant", "Welcome"), turn("user", "a"), turn("assistant", "b")]
    assert supervised_runs(tokenizer, messages) == ["b<|end|>"]
    assert conversation_rows(tokenizer, Conversation(messages[:2])) == []


def test_long_rows_keep_whole_answers(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [turn("user", "a"), turn("assistant", "xyz"), turn("user", "c"), turn("assistant", "zyx")]
    row = encode(tokenizer, messages)
    size, first = len(row.token_ids), row.loss_mask.index(True)
    for limit in (size, size + 1):
        assert encode(tokenizer, messages, limit) == row
    # The first answer is four tokens: x, y, z and the end of turn.
    for limit in (first + 4, first + 5, size - 1):
        kept = first + 4
        assert encode(tokenizer, messages, limit) == (
            row.token_ids[:kept],
            row.loss_mask[:kept],
            size - kept,
            "",
        )
    for limit, reason in (
        (first + 3, ""),
        (first + 2, ""),
        (first + 1, "empty_mask"),
        (first, "empty_mask"),
        (1, "empty_mask"),
    ):
        assert encode(tokenizer, messages, limit) == (
            row.token_ids[:limit],
            row.loss_mask[:limit],
            size - limit,
            reason,
        )


def test_a_template_that_trims_supervises_what_it_renders() -> None:
    trimming = CHATML.replace("{{ m['content'] }}", "{{ m['content'] | trim }}")
    assert supervised_runs(train_tokenizer(trimming), [turn("user", "a"), turn("assistant", " b\n")]) == [
        "b<|end|>"
    ]


def test_a_template_that_changes_earlier_turns_gives_a_row_for_each_answer() -> None:
    template = (  # answers are shown only while they are the last message
        "{% for m in messages %}<|start|>{{ m['role'] }}\n"
        "{% if m['role'] == 'user' or loop.last %}{{ m['content'] }}{% endif %}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
    )
    tokenizer = train_tokenizer(template)
    messages = [turn("user", "a"), turn("assistant", "b"), turn("user", "c"), turn("assistant", "d")]
    rows = encode_rows(tokenizer, conversation_rows(tokenizer, Conversation(messages)))
    first = "<|start|>user\na<|end|>\n<|start|>assistant\n"
    assert [text_spans(tokenizer, row.token_ids, row.loss_mask) for row in rows] == [
        [(first, False), ("b<|end|>", True)],
        [(f"{first}<|end|>\n<|start|>user\nc<|end|>\n<|start|>assistant\n", False), ("d<|end|>", True)],
    ]


@pytest.mark.parametrize(
    "template",
    [
        CHATML.replace("{% for m in messages %}", "{% for m in messages if m['role'] == 'user' %}"),
        CHATML.replace("<|start|>assistant\n{% endif", "<|start|>model\n{% endif"),
        CHATML.replace("{% endif %}", "{% else %}<|pad|>{% endif %}"),
        CHATML.replace("<|end|>\n{% endfor", "<|end|> Over.\n{% endfor"),
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}",
    ],
    ids=["not written", "not after the prompt", "conversation closed", "text after the end", "no end"],
)
def test_an_answer_that_the_rule_does_not_find_is_refused(template: str) -> None:
    with pytest.raises(BadRow, match=r"does not write message 2 \(assistant\) between") as e:
        conversation_rows(train_tokenizer(template), Conversation(PLAIN))
    assert e.value.reason == "answer_not_cut"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{{ messages[0]['content'] + 1 }}", "can only concatenate"),
    ],
)
def test_a_template_that_refuses_a_conversation_says_why(template: str, reason: str) -> None:
    with pytest.raises(BadRow, match=rf"refuses the conversation \({reason}.*\); change") as e:
        conversation_rows(train_tokenizer(template), Conversation(PLAIN))
    assert e.value.reason == "template_refuses"


def test_a_tokenizer_is_loaded_from_its_directory(
    tokenizer: PreTrainedTokenizerBase, tokenizer_dir: Path
) -> None:
    messages = [turn("user", "Hello é")]
    assert render_prompt(load_chat_tokenizer(tokenizer_dir), messages) == render_prompt(tokenizer, messages)
    (piece,) = prompt_row(tokenizer, Conversation(messages))
    assert piece.text.endswith("Hello é<|end|>\n<|start|>assistant\n")


def test_a_tokenizer_without_a_chat_template_is_an_error_that_names_the_directory(tmp_path: Path) -> None:
    train_tokenizer(template=None).save_pretrained(str(tmp_path))
    with pytest.raises(
        ValueError, match=r"has no chat template; choose a chat model or add chat_template\.jinja"
    ) as e:
        load_chat_tokenizer(tmp_path)
    assert str(e.value).startswith(f"{tmp_path}: ")


def test_a_tokenizer_that_adds_a_space_before_every_text_adds_none_inside_a_row(tmp_path: Path) -> None:
    tokenizer = train_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.save_pretrained(str(tmp_path))
    loaded = load_chat_tokenizer(tmp_path)
    assert supervised_runs(loaded, [turn("user", "a"), turn("assistant", "b")]) == ["b<|end|>"]
    assert encode(loaded, [turn("user", "a"), turn("assistant", "\n  b")]).reason == "merged_pieces"


def test_a_tokenizer_that_changes_the_begin_of_every_text_is_an_error(tmp_path: Path) -> None:
    tokenizer = train_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Prepend("z")
    tokenizer.save_pretrained(str(tmp_path))
    with pytest.raises(ValueError, match=r"cannot tokenize a text in pieces.*; choose a target") as e:
        load_chat_tokenizer(tmp_path)
    assert str(e.value).startswith(f"{tmp_path}: ")


@pytest.mark.parametrize("name", ["", "gone"])
def test_a_directory_without_a_tokenizer_is_an_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(
        ValueError, match=r"no readable tokenizer .*; give a target directory with tokenizer\.json"
    ) as e:
        load_chat_tokenizer(tmp_path / name)
    assert str(e.value).startswith(str(tmp_path / name))
