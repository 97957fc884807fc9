"""Tokenize conversations and make their loss masks.

A row is a list of pieces (eagle3/data/template.py). A piece begins where a generation prompt ends and is
tokenized on its own, so the tokens before an answer are those that the engine gets as a prompt. Tokenized as
one text, the end of the prompt could merge with the start of the answer. Pieces of ChatML:

    <s>user⏎Hi</s>⏎<s>assistant⏎ | Hello!</s>⏎<s>user⏎Bye</s>⏎<s>assistant⏎ | See you!</s>
                                   ^^^^^^^^^^ supervised                       ^^^^^^^^^^^^
"""

from functools import lru_cache
from itertools import count, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from eagle3.data.conversations import Conversation
from eagle3.data.template import Piece, template_of
from eagle3.shards.tokens import TokenRow

if TYPE_CHECKING:
    from transformers import BatchEncoding, PreTrainedTokenizerBase


class EncodedRow(NamedTuple):
    """loss_mask: True where the model wrote the token. num_cut: tokens cut off. reason: why to drop it."""

    token_ids: list[int]
    loss_mask: list[bool]
    num_cut: int
    reason: str


def load_chat_tokenizer(tokenizer_dir: str | Path) -> "PreTrainedTokenizerBase":
    """Load a target's tokenizer from its directory; refuse one without a chat template."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(tokenizer_dir), local_files_only=True)
    except (OSError, ValueError) as e:
        rule = f"{tokenizer_dir}: no readable tokenizer ({str(e).partition(chr(10))[0]})"
        raise ValueError(f"{rule}; give a target directory with tokenizer.json") from e
    if not tokenizer.chat_template:
        remedy = "choose a chat model or add chat_template.jinja"
        raise ValueError(f"{tokenizer_dir}: the tokenizer has no chat template; {remedy}")
    if not tokenizer.is_fast or _anchor(tokenizer) is None:
        raise ValueError(
            f"{tokenizer_dir}: the tokenizer cannot tokenize a text in pieces (it is slow, or changes the "
            "start of every text); choose a target with a fast tokenizer (tokenizer.json)"
        )
    return cast("PreTrainedTokenizerBase", tokenizer)


def conversation_rows(
    tokenizer: "PreTrainedTokenizerBase", conversation: Conversation, thinking: bool | None = None
) -> list[list[Piece]]:
    """Render a conversation up to its last answer and cut it where answers begin.

    Args:
        tokenizer: fast, with a chat template.
        conversation: answers before the first user turn are not supervised.
        thinking: the template's switch; None leaves it to the template, False also drops the reasoning.

    Returns:
        several rows if the template rewrites earlier turns, for example drops their reasoning. Each answer is
        supervised in exactly one row; without an answer there is no row.

    Raises:
        BadRow: if the template cannot write the conversation.
    """
    return template_of(tokenizer, thinking).rows(conversation)


def prompt_row(
    tokenizer: "PreTrainedTokenizerBase", conversation: Conversation, thinking: bool | None = None
) -> list[Piece]:
    """Render a conversation and the generation prompt; arguments and errors as in `conversation_rows`."""
    return template_of(tokenizer, thinking).prompt(conversation)


def encode_rows(
    tokenizer: "PreTrainedTokenizerBase", rows: list[list[Piece]], max_tokens: int | None = None
) -> list[EncodedRow]:
    """Tokenize the pieces of many rows in one batch.

    Args:
        tokenizer: the one that rendered the rows.
        rows: pieces as `conversation_rows` and `prompt_row` return them.
        max_tokens: longer rows are cut after the last answer that fits, or inside the first answer.

    Returns:
        one for each row, in order. reason: empty_mask if no two supervised tokens follow each other (an
        answer's first token is never drafted), merged_pieces if the tokenizer merges the pieces.
    """
    anchor = _anchor(tokenizer) or ""
    # For the engine a row is one text, so only the first piece is tokenized as the start of a text.
    texts = [f"{anchor if i else ''}{piece.text}" for pieces in rows for i, piece in enumerate(pieces)]
    encoded = _encode(tokenizer, [anchor, *texts])
    index = count(1)  # text 0 is the anchor
    encoded_rows = []
    for pieces in rows:
        token_ids: list[int] = []
        loss_mask: list[bool] = []
        reason = ""
        for i, piece in enumerate(pieces):
            ids, num_answer, is_merged = _piece_tokens(encoded, next(index), anchor if i else "", piece)
            reason = "merged_pieces" if is_merged else reason
            token_ids += ids
            loss_mask += [True] * num_answer + [False] * (len(ids) - num_answer)
        end = _end_of_row(loss_mask, max_tokens)
        has_answers = any(piece.num_answer for piece in pieces)
        if not reason and has_answers and b"\1\1" not in bytes(loss_mask[:end]):
            reason = "empty_mask"
        encoded_rows.append(EncodedRow(token_ids[:end], loss_mask[:end], len(token_ids) - end, reason))
    return encoded_rows


def _piece_tokens(
    encoded: "BatchEncoding", index: int, anchor: str, piece: Piece
) -> tuple[list[int], int, bool]:
    """Token ids of a piece, the number of answer tokens at its start, and True if a token crosses a border.

    Text 0 is the anchor alone; text `index` is the anchor (empty in a row's first piece) and the piece.
    """
    ids = encoded["input_ids"][index]
    num_answer = len(ids)
    is_merged = False
    if piece.num_answer < len(piece.text):
        # An answer ends with a control token, so the next text cannot be part of its last token.
        last = encoded.char_to_token(index, len(anchor) + piece.num_answer - 1) if piece.num_answer else -1
        num_answer = (last or 0) + 1
        is_merged = last is None
    if anchor:
        anchor_ids = encoded["input_ids"][0]
        is_merged = is_merged or ids[: len(anchor_ids)] != anchor_ids
        ids = ids[len(anchor_ids) :]
        num_answer = max(num_answer - len(anchor_ids), 0)
    return ids, num_answer, is_merged


def text_spans(
    tokenizer: "PreTrainedTokenizerBase", token_ids: list[int], loss_mask: list[bool]
) -> list[tuple[str, bool]]:
    """Decode a row for reports: (text, supervised) for every run of equal flags."""
    spans = []
    for supervised, run in groupby(zip(loss_mask, token_ids, strict=True), key=lambda pair: pair[0]):
        ids = [token for _, token in run]
        text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        spans.append((text, supervised))
    return spans


def sample_of(tokenizer: "PreTrainedTokenizerBase", row: TokenRow) -> dict[str, Any]:
    """A row for reports, JSON-ready: sample_id, source, number of tokens, spans [[text, supervised], …]."""
    spans = [list(span) for span in text_spans(tokenizer, row.token_ids, row.loss_mask)]
    return {"sample_id": row.sample_id, "source": row.source, "tokens": len(row.token_ids), "spans": spans}


def _encode(tokenizer: "PreTrainedTokenizerBase", texts: list[str]) -> "BatchEncoding":
    """Tokenize texts in one batch without special tokens: templates write their own."""
    no_masks = {"return_attention_mask": False, "return_token_type_ids": False}
    return tokenizer(texts, add_special_tokens=False, verbose=False, **no_masks)


@lru_cache(maxsize=8)
def _anchor(tokenizer: "PreTrainedTokenizerBase") -> str | None:
    """A prefix with which a piece is tokenized as the middle of a text; None if no prefix does that.

    SentencePiece tokenizers add a space to the start of every text, which a later piece must not get.
    """
    for anchor in ("", tokenizer.bos_token or "", "\n"):
        start, begun, piece = _encode(tokenizer, [anchor, "a", f"{anchor}b"])["input_ids"]
        text = tokenizer.decode(begun + piece[len(start) :], clean_up_tokenization_spaces=False)
        if piece[: len(start)] == start and text.strip() == "ab":
            return anchor
    return None


def _end_of_row(loss_mask: list[bool], max_tokens: int | None) -> int:
    if max_tokens is None or len(loss_mask) <= max_tokens:
        return len(loss_mask)
    ends = (e for e in range(max_tokens, 0, -1) if loss_mask[e - 1] and not loss_mask[e])
    return next(ends, max_tokens)
