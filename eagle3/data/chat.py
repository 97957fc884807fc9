"""Conversations to token ids and loss masks, by the tokenizer's own chat template.

The boundary of an assistant turn is where two renderings part: (history + generation prompt) against (history + answer). The text
is cut there and every piece is tokenized on its own, so that the tokens before an answer are exactly those that serving feeds;
tokenizing the whole text could merge the last characters of the generation prompt with the first of the answer. Pieces of ChatML:

    <s>user⏎Hi</s>⏎<s>assistant⏎ | Hello!</s>⏎ | <s>user⏎Bye</s>⏎<s>assistant⏎ | See you!</s>⏎
    not supervised                 ^^^^^^^^^^    not supervised                  ^^^^^^^^^^^^

An answer is supervised up to its piece's last special token, the end of turn.
"""

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from eagle3.data.conversations import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Piece(NamedTuple):
    """A stretch of rendered text; `answer` where an assistant turn begins with it."""

    text: str
    answer: bool


def load_chat_tokenizer(tokenizer_dir: str | Path) -> "PreTrainedTokenizerBase":
    """Load a target's tokenizer from its directory, without the network.

    Raises:
        ValueError: if there is none, it has no chat template, or texts cannot be tokenized piece by piece; names the directory.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(tokenizer_dir), local_files_only=True)
    except (OSError, ValueError) as e:
        reason = str(e).partition("\n")[0]
        raise ValueError(f"{tokenizer_dir}: no readable tokenizer ({reason}); give a target directory with tokenizer.json") from e
    if not tokenizer.chat_template:
        raise ValueError(f"{tokenizer_dir}: the tokenizer has no chat template; choose a chat model or add chat_template.jinja")
    pieces = encode_texts(tokenizer, ["a", "b"])
    if tokenizer.decode(pieces[0] + pieces[1], clean_up_tokenization_spaces=False).strip() != "ab":
        raise ValueError(
            f"{tokenizer_dir}: the tokenizer adds a space before every text, so turns cannot be tokenized one by one; "
            "choose a target whose tokenizer does not"
        )
    return tokenizer


def prompt_text(tokenizer: "PreTrainedTokenizerBase", messages: list[Message]) -> str:
    """Render messages and the generation prompt: what the target answers."""
    return _render(tokenizer, messages, add_generation_prompt=True)


def conversation_pieces(tokenizer: "PreTrainedTokenizerBase", messages: list[Message]) -> list[Piece]:
    """Render a conversation up to its last assistant turn and cut it where answers begin and end.

    Args:
        tokenizer: with a chat template.
        messages: with at least one assistant turn.

    Returns:
        pieces by turns not supervised and answer, together the rendered text.

    Raises:
        ValueError: if the template refuses the conversation, renders an answer elsewhere than behind its generation prompt, or
            changes earlier turns as the conversation grows.
    """
    pieces: list[Piece] = []
    done = ""
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = _render(tokenizer, messages[:i], add_generation_prompt=True)
        whole = _render(tokenizer, messages[: i + 1], add_generation_prompt=False)
        if not prompt.startswith(done):
            raise ValueError(
                f"the chat template renders the turns before message {i + 1} differently once it follows; "
                "cut the row after its first answer, or set regenerate.enabled to true"
            )
        if not whole.startswith(prompt) or whole == prompt:
            raise ValueError(
                f"the chat template does not render message {i + 1} (assistant) behind its generation prompt; "
                "set regenerate.enabled to true, or change the row to turns that the template allows"
            )
        pieces += [Piece(prompt[len(done) :], False), Piece(whole[len(prompt) :], True)]
        done = whole
    return pieces


def encode_texts(tokenizer: "PreTrainedTokenizerBase", texts: list[str]) -> list[list[int]]:
    """Tokenize texts in one batch; nothing is added, since templates write their own special tokens."""
    if not texts:
        return []
    encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False, verbose=False)
    ids: list[list[int]] = encoded["input_ids"]
    return ids


def encode_conversations(
    tokenizer: "PreTrainedTokenizerBase", conversations: list[list[Piece]]
) -> list[tuple[list[int], list[bool]]]:
    """Tokenize the pieces of many conversations in one batch.

    Returns:
        for each conversation T token ids and T flags, True on the assistant's tokens: from the start of an answer piece to its
        last special token, the end of turn; to the piece's end where it has none. What the template writes behind the last end
        of turn is cut off: no loss needs it.
    """
    special = _special_ids(tokenizer)
    encoded = iter(encode_texts(tokenizer, [p.text for pieces in conversations for p in pieces]))
    rows = []
    for pieces in conversations:
        token_ids: list[int] = []
        loss_mask: list[bool] = []
        for piece in pieces:
            ids = next(encoded)
            ends = [i + 1 for i, t in enumerate(ids) if t in special]
            num_supervised = (ends[-1] if ends else len(ids)) if piece.answer else 0
            token_ids += ids
            loss_mask += [True] * num_supervised + [False] * (len(ids) - num_supervised)
        unneeded = len(ids) - num_supervised if pieces and pieces[-1].answer else 0
        rows.append((token_ids[: len(token_ids) - unneeded], loss_mask[: len(loss_mask) - unneeded]))
    return rows


def render_prompt(tokenizer: "PreTrainedTokenizerBase", messages: list[Message]) -> list[int]:
    """Token ids of the messages and the generation prompt."""
    return encode_texts(tokenizer, [prompt_text(tokenizer, messages)])[0]


def render_conversation(tokenizer: "PreTrainedTokenizerBase", messages: list[Message]) -> tuple[list[int], list[bool]]:
    """T token ids of a conversation up to its last answer, and T flags, True on the assistant's tokens and ends of turn."""
    return encode_conversations(tokenizer, [conversation_pieces(tokenizer, messages)])[0]


def text_spans(tokenizer: "PreTrainedTokenizerBase", token_ids: list[int], loss_mask: list[bool]) -> list[tuple[str, bool]]:
    """Decode a row for people: (text, supervised) for every run of equal mask."""
    runs = [(m, [t for t, _ in run]) for m, run in groupby(zip(token_ids, loss_mask, strict=True), key=lambda pair: pair[1])]
    return [(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False), m) for m, ids in runs]


def _render(tokenizer: "PreTrainedTokenizerBase", messages: list[Message], add_generation_prompt: bool) -> str:
    import jinja2

    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    except (jinja2.TemplateError, TypeError) as e:
        raise ValueError(f"the chat template refuses the conversation ({e}); change the row to turns that it allows") from e
    return text


def _special_ids(tokenizer: "PreTrainedTokenizerBase") -> set[int]:
    return {i for i, t in tokenizer.added_tokens_decoder.items() if t.special} | set(tokenizer.all_special_ids)
