"""A conversation without its answers: the user's turns and the tools' results, played to the target.

The target first gets the messages up to the first answer. After an answer without tool calls it gets the next
turn, after an answer with calls their recorded results.

    user  assistant  user  assistant(calls)  tool  assistant        the source row
    user             user                    tool                   its script: messages, one turn, one result
"""

import json
from dataclasses import dataclass
from typing import Any

from eagle3.data.conversations import Conversation, Message
from eagle3.data.recorded import Recorded


@dataclass(frozen=True)
class Script:
    """messages: up to the first answer. turns: later user turns, each with all its messages."""

    messages: list[Message]
    turns: list[list[Message]]
    tools: list[dict[str, Any]] | None
    thinking: bool | None
    recorded: Recorded

    @property
    def has_more(self) -> bool:
        """True if a turn or a tool result can follow the first answer."""
        return bool(self.turns or self.tools)

    def to_json(self) -> str:
        fields = vars(self) | {"recorded": self.recorded.to_json()}
        return json.dumps(fields, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> "Script":
        fields = json.loads(text)
        return cls(**fields | {"recorded": Recorded.from_json(fields["recorded"])})


def script_of(conversation: Conversation, thinking: bool | None) -> Script:
    """Remove a conversation's answers; assistant turns before the first user turn stay."""
    groups: list[list[Message]] = [[]]
    for message in conversation.messages:
        has_user = any(m["role"] == "user" for m in groups[-1])
        if message["role"] not in ("assistant", "tool"):
            groups[-1].append(message)
        elif has_user:
            groups.append([])
        elif len(groups) == 1 and message["role"] == "assistant":
            groups[0].append(message)
    # The target answers only user turns.
    asked = [group for group in groups if any(m["role"] == "user" for m in group)]
    recorded = Recorded.from_messages(conversation.messages)
    return Script(asked[0], asked[1:], conversation.tools, thinking, recorded)
