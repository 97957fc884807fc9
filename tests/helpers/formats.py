"""Public chat formats on tiny tokenizers.

Each format says how an assistant's turn reads when the model writes it: `written`.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from transformers import PreTrainedTokenizerFast

from eagle3.data.conversations import Message
from tests.helpers.chat_templates import (
    CHATML_TURNS,
    DEEPSEEK_R1,
    GEMMA3,
    HARMONY,
    LLAMA31,
    MISTRAL,
    QWEN3,
    QWEN3_CODER,
    QWEN3_THINKING,
)
from tests.helpers.tiny_tokenizer import LINE_BREAKS_TOGETHER, train_spaced_tokenizer, train_tokenizer


@dataclass(frozen=True)
class Format:
    """A template, its tokens (`added` are not flagged as special), and how the model's own text reads.

    written: (message, whether thoughts are shown) to the text of that turn, end of turn included.
    """

    name: str
    template: str
    special: tuple[str, ...]
    written: Callable[[Message], str]
    added: tuple[str, ...] = ()
    eos: str = ""
    bos: str | None = None
    spaced: str = ""

    def tokenizer(self) -> PreTrainedTokenizerFast:
        return _tokenizer(self.name)


def call_of(message: Message) -> tuple[str, str]:
    function = message["tool_calls"][0]["function"]
    return function["name"], json.dumps(function["arguments"], ensure_ascii=False)


def written_by_qwen3(m: Message) -> str:
    thoughts = f"<think>\n{m['reasoning_content']}\n</think>\n\n" if "reasoning_content" in m else ""
    if "tool_calls" not in m:
        return f"{thoughts}{m['content'].lstrip(chr(10))}<|im_end|>"
    name, arguments = call_of(m)
    gap = "\n" if m["content"] else ""
    call = f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
    return f"{thoughts}{m['content']}{gap}{call}<|im_end|>"


def written_by_qwen3_coder(m: Message) -> str:
    text = written_by_qwen3(m)
    if "tool_calls" not in m:
        return text
    function = m["tool_calls"][0]["function"]
    arguments = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in function["arguments"].items())
    before = text.partition("<tool_call>")[0]
    return (
        f"{before}<tool_call>\n<function={function['name']}>\n{arguments}</function>\n</tool_call><|im_end|>"
    )


def written_by_llama(m: Message) -> str:
    if "tool_calls" not in m:
        return m["content"].strip() + "<|eot_id|>"
    return '{{"name": "{}", "parameters": {}}}<|eot_id|>'.format(*call_of(m))


def written_by_mistral(m: Message) -> str:
    if "tool_calls" not in m:
        return f" {m['content'].strip()}</s>"
    return '[TOOL_CALLS] [{{"name": "{}", "arguments": {}, "id": "{}"}}]</s>'.format(
        *call_of(m), m["tool_calls"][0]["id"]
    )


def written_by_gpt_oss(m: Message) -> str:
    thoughts = m.get("reasoning_content", "")
    analysis = f"<|channel|>analysis<|message|>{thoughts}<|end|><|start|>assistant" if thoughts else ""
    if "tool_calls" not in m:
        return f"{analysis}<|channel|>final<|message|>{m['content']}<|return|>"
    return "{} to=functions.{}<|channel|>commentary json<|message|>{}<|call|>".format(analysis, *call_of(m))


IM = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN_ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
HEADERS = (
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|python_tag|>",
)
INST = (
    "[INST]",
    "[/INST]",
    "[TOOL_CALLS]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
)
CHANNELS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>")
CALLS = tuple(f"<｜tool▁{t}｜>" for t in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep"))
OUTPUTS = tuple(f"<｜tool▁{t}｜>" for t in ("outputs▁begin", "outputs▁end", "output▁begin", "output▁end"))
SENTENCE = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")

_ALL = [
    Format("smollm2", CHATML_TURNS, IM, lambda m: m["content"] + "<|im_end|>", eos="<|im_end|>"),
    Format("qwen3", QWEN3, IM, written_by_qwen3, QWEN_ADDED, eos="<|im_end|>"),
    Format("llama3.1", LLAMA31, HEADERS, written_by_llama, eos="<|eot_id|>", bos="<|begin_of_text|>"),
    Format(
        "gemma3",
        GEMMA3,
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        lambda m: m["content"].strip() + "<end_of_turn>",
        ("\n\n", "<table>"),
        eos="<eos>",
        bos="<bos>",
    ),
    Format("mistral", MISTRAL, ("<s>", "</s>", *INST), written_by_mistral, eos="</s>", bos="<s>"),
    Format("gpt-oss", HARMONY, CHANNELS, written_by_gpt_oss, eos="<|return|>"),
    Format(
        "deepseek-r1",
        DEEPSEEK_R1,
        SENTENCE,
        lambda m: "",  # its history never repeats an answer as the model writes it
        ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", *CALLS, *OUTPUTS),
        eos=SENTENCE[1],
        bos=SENTENCE[0],
    ),
]
FORMATS = {f.name: f for f in _ALL}
FORMATS["qwen3-thinking"] = replace(
    FORMATS["qwen3"],
    name="qwen3-thinking",
    template=QWEN3_THINKING,
    written=lambda m: written_by_qwen3(m).removeprefix("<think>\n"),
)
FORMATS["qwen3-coder"] = replace(
    FORMATS["qwen3"], name="qwen3-coder", template=QWEN3_CODER, written=written_by_qwen3_coder
)
# Mistral's own tokenizers: tags as special tokens or as plain text, with a space before every text, or also
# after every special token.
FORMATS["mistral-spaced"] = replace(FORMATS["mistral"], name="mistral-spaced", spaced="first")
FORMATS["mistral-legacy"] = replace(
    FORMATS["mistral"], name="mistral-legacy", special=("<s>", "</s>"), spaced="always"
)


@cache
def _tokenizer(name: str) -> PreTrainedTokenizerFast:
    f = FORMATS[name]
    if f.spaced:
        return train_spaced_tokenizer(f.template, f.special, f.eos, str(f.bos), legacy=f.spaced == "always")
    return train_tokenizer(f.template, f.special, f.added, f.eos, f.bos, LINE_BREAKS_TOGETHER)
