"""What follows the target's answers in a conversation: the user's next turns, and the tools' results.

A script holds everything but the assistant's words. Its messages up to the first answer are what the target
is asked first. After an answer without tool calls the next turn follows, after one with calls their recorded
results.

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
    """messages: up to the first answer. turns: messages after each later answer. tools: as in Conversation.

    thinking: on, off, or None to leave it to the template. recorded: results of tool calls.
    """

    messages: list[Message]
    turns: list[list[Message]]
    tools: list[dict[str, Any]] | None
    thinking: bool | None
    recorded: Recorded

    @property
    def has_more(self) -> bool:
        """Whether anything can follow the first answer."""
        return bool(self.turns or self.tools)

    def to_json(self) -> str:
        """The script as it is in a token shard."""
        fields = vars(self) | {"recorded": self.recorded.to_json()}
        return json.dumps(fields, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> "Script":
        """The inverse of `to_json`."""
        fields = json.loads(text)
        return cls(**fields | {"recorded": Recorded.from_json(fields["recorded"])})


def script_of(conversation: Conversation, thinking: bool | None) -> Script:
    """Take the assistant's turns out of a conversation, except those before the first user turn."""
    groups: list[list[Message]] = [[]]
    for message in conversation.messages:
        has_user = any(m["role"] == "user" for m in groups[-1])
        if message["role"] not in ("assistant", "tool"):
            groups[-1].append(message)
        elif has_user:
            groups.append([])
        elif len(groups) == 1 and message["role"] == "assistant":
            groups[0].append(message)
    # A group without a user turn asks nothing.
    asked = [group for group in groups if any(m["role"] == "user" for m in group)]
    recorded = Recorded.from_messages(conversation.messages)
    return Script(asked[0], asked[1:], conversation.tools, thinking, recorded)
