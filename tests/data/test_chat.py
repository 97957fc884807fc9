"""Boundaries and masks of chat turns."""

import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, pre_tokenizers
from transformers import PreTrainedTokenizerBase

from eagle3.data.chat import (
    conversation_pieces,
    encode_conversations,
    load_chat_tokenizer,
    prompt_text,
    render_conversation,
    render_prompt,
    text_spans,
)
from eagle3.data.conversations import Message
from tests.data.tiny import CHATML, train_tokenizer

CONTENT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20) | st.sampled_from(
    [
        "\n",
        " ",
        "\n\n  Hello",
        "<|end|>",
        "<|start|>assistant\nHello<|end|>",
        "assistant",
        "e\u0301",
        "👩‍👩‍👧",
        "\ufeff",
        "Help.<|end|>\n",
    ]
)


def turn(role: str, content: str) -> Message:
    return Message(role=role, content=content)


def decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def supervised_runs(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> list[str]:
    return [text for text, supervised in text_spans(tokenizer, *render_conversation(tokenizer, messages)) if supervised]


def test_mask_of_a_short_conversation_by_hand(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [turn("system", "x"), turn("user", "a"), turn("assistant", "b"), turn("user", "c"), turn("assistant", "d")]
    ids, mask = render_conversation(tokenizer, messages)
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
    assert render_conversation(tokenizer, [*answered, turn("user", "c")]) == render_conversation(tokenizer, answered)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(CONTENT, CONTENT), min_size=1, max_size=3), st.none() | CONTENT)
def test_mask_is_exactly_the_assistants_words_and_end_of_turn(
    tokenizer: PreTrainedTokenizerBase, exchanges: list[tuple[str, str]], system: str | None
) -> None:
    messages = [turn("system", system)] if system is not None else []
    for asked, answered in exchanges:
        messages += [turn("user", asked), turn("assistant", answered)]
    ids, mask = render_conversation(tokenizer, messages)
    assert supervised_runs(tokenizer, messages) == [answered + "<|end|>" for _, answered in exchanges]
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    assert decode(tokenizer, ids) + "\n" == whole
    first = messages[: next(i for i, m in enumerate(messages) if m["role"] == "assistant")]
    prompt = render_prompt(tokenizer, first)
    assert ids[: len(prompt)] == prompt
    assert mask[: len(prompt) + 1] == [False] * len(prompt) + [True]


def test_an_answer_that_would_merge_with_the_generation_prompt_keeps_its_own_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [turn("user", "a"), turn("assistant", "\n  Hello")]
    merged = tokenizer(tokenizer.apply_chat_template(messages, tokenize=False), add_special_tokens=False)["input_ids"]
    prompt = render_prompt(tokenizer, messages[:1])
    assert merged[: len(prompt)] != prompt, "the case does not occur with this tokenizer"
    assert supervised_runs(tokenizer, messages) == ["\n  Hello<|end|>"]


def test_a_batch_equals_one_by_one(tokenizer: PreTrainedTokenizerBase) -> None:
    conversations = [[turn("user", "a" * n), turn("assistant", "b" * n)] for n in (1, 7, 30)]
    batch = encode_conversations(tokenizer, [conversation_pieces(tokenizer, m) for m in conversations])
    assert batch == [render_conversation(tokenizer, m) for m in conversations]
    assert encode_conversations(tokenizer, []) == []


def test_a_template_without_special_end_of_turn_supervises_the_whole_answer() -> None:
    template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    assert supervised_runs(train_tokenizer(template), [turn("user", "a"), turn("assistant", "b")]) == ["b\n"]


def test_a_template_that_trims_supervises_what_it_renders() -> None:
    trimming = CHATML.replace("{{ m['content'] }}", "{{ m['content'] | trim }}")
    assert supervised_runs(train_tokenizer(trimming), [turn("user", "a"), turn("assistant", " b\n")]) == ["b<|end|>"]


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (  # answers are shown only while they are the last message
            "{% for m in messages %}<|start|>{{ m['role'] }}\n"
            "{% if m['role'] == 'user' or loop.last %}{{ m['content'] }}{% endif %}<|end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}",
            "renders the turns before message 4 differently once it follows; cut the row after its first answer",
        ),
        (
            CHATML.replace("<|start|>assistant\n{% endif", "<|start|>model\n{% endif"),
            "does not render message 2 (assistant) behind",
        ),
        (
            CHATML.replace("{% for m in messages %}", "{% for m in messages if m['role'] == 'user' %}"),
            "does not render message 2",
        ),
        ("{{ raise_exception('no system role') }}", "refuses the conversation (no system role); change the row"),
        ("{{ messages[0]['content'] + 1 }}", "refuses the conversation ("),
    ],
)
def test_a_template_without_stable_boundaries_is_an_error(template: str, said: str) -> None:
    messages = [turn("user", "a"), turn("assistant", "b"), turn("user", "c"), turn("assistant", "d")]
    with pytest.raises(ValueError, match=re.escape(said)):
        render_conversation(train_tokenizer(template), messages)


def test_a_tokenizer_is_loaded_from_its_directory(tokenizer: PreTrainedTokenizerBase, tokenizer_dir: Path) -> None:
    messages = [turn("user", "Hello é")]
    assert render_prompt(load_chat_tokenizer(tokenizer_dir), messages) == render_prompt(tokenizer, messages)
    assert prompt_text(tokenizer, messages).endswith("Hello é<|end|>\n<|start|>assistant\n")


def test_a_tokenizer_without_a_chat_template_is_an_error_that_names_the_directory(tmp_path: Path) -> None:
    train_tokenizer(template=None).save_pretrained(str(tmp_path))
    with pytest.raises(ValueError, match=r"has no chat template; choose a chat model or add chat_template\.jinja") as e:
        load_chat_tokenizer(tmp_path)
    assert str(e.value).startswith(f"{tmp_path}: ")


def test_a_tokenizer_that_adds_a_space_before_every_text_is_an_error(tmp_path: Path) -> None:
    tokenizer = train_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save_pretrained(str(tmp_path))
    with pytest.raises(ValueError, match=r"adds a space before every text.*choose a target"):
        load_chat_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["", "gone"])
def test_a_directory_without_a_tokenizer_is_an_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"no readable tokenizer .*; give a target directory with tokenizer\.json") as e:
        load_chat_tokenizer(tmp_path / name)
    assert str(e.value).startswith(str(tmp_path / name))
