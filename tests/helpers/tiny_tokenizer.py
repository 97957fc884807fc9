"""Tiny tokenizers, so that no test needs a real target: byte-level BPE, and BPE with a space before every text."""

import json
from collections.abc import Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% if messages and messages[0]['role'] != 'system' %}<|start|>system\nHelp.<|end|>\n{% endif %}"
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
# How tokenizers since GPT-4 cut texts: line breaks stay together whatever follows.
LINE_BREAKS_TOGETHER = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CORPUS = [
    "Hello there, how are you?\n\n  Hello again",
    "system user assistant Help.",
    "the answer is 42 <|start|> <|end|>",
] * 3


def train_tokenizer(
    template: str | None = CHATML,
    special: Sequence[str] = ("<|pad|>", "<|start|>", "<|end|>"),
    added: Sequence[str] = (),
    eos: str = "<|end|>",
    bos: str | None = None,
    split: str | None = None,
) -> PreTrainedTokenizerFast:
    """Byte-level BPE. added: tokens not flagged as special, as <think> in public tokenizers. split: GPT-2's if None."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if split:
        words = pre_tokenizers.Split(Regex(split), "isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    backend.decoder = decoders.ByteLevel()
    tokens = [AddedToken(t, special=True, normalized=False) for t in special]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=tokens,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in added])
    return _wrapped(backend, template, eos, bos)


def train_spaced_tokenizer(
    template: str, special: Sequence[str], eos: str, bos: str, legacy: bool
) -> PreTrainedTokenizerFast:
    """BPE with byte fallback that puts a space before every text; legacy: also after every special token."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=200, show_progress=False))
    learned = json.loads(backend.to_str())["model"]
    pieces = [f"<0x{i:02X}>" for i in range(256)] + list(learned["vocab"])
    merges = [tuple(m) for m in learned["merges"]]
    backend = Tokenizer(
        models.BPE({p: i for i, p in enumerate(pieces)}, merges, byte_fallback=True, fuse_unk=True)
    )
    if legacy:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    return _wrapped(backend, template, eos, bos)


def _wrapped(backend: Tokenizer, template: str | None, eos: str, bos: str | None) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=eos, bos_token=bos, chat_template=template
    )
