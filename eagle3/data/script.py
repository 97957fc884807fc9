"""How a conversation goes on while the target answers it: what the user says next, and what the tools say to which call.

A script holds everything but the assistant's words. Its messages up to the first answer are what the target is asked first; after
an answer without tool calls the next turn follows, after one with calls the recorded results of these calls.

    user  assistant  user  assistant(calls)  tool  assistant        the source row
    user             user                    tool                   its script: messages, one turn, one recorded result
"""

import json
from dataclasses import dataclass
from typing import Any

from eagle3.data.conversations import Conversation, Message
from eagle3.data.recorded import Recorded


@dataclass(frozen=True)
class Script:
    """messages: up to the first answer. turns: what is said after each of the answers. tools: JSON schemas, as in Conversation.

    thinking: on, off, or None to leave it to the template. recorded: what tools said to which calls.
    """

    messages: list[Message]
    turns: list[list[Message]]
    tools: list[dict[str, Any]] | None
    thinking: bool | None
    recorded: Recorded

    @property
    def goes_on(self) -> bool:
        """Whether anything can follow the first answer."""
        return bool(self.turns or self.tools)

    def to_json(self) -> str:
        """The script as it travels in a token shard."""
        fields = {
            "messages": self.messages,
            "turns": self.turns,
            "tools": self.tools,
            "thinking": self.thinking,
        }
        return json.dumps(fields | {"recorded": self.recorded.to_json()}, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> "Script":
        """The inverse of `to_json`."""
        fields = json.loads(text)
        return cls(**fields | {"recorded": Recorded.from_json(fields["recorded"])})


def script_of(conversation: Conversation, thinking: bool | None) -> Script:
    """Take the assistant's words out of a conversation, those before the first user turn excepted: they are context."""
    groups: list[list[Message]] = [[]]
    for message in conversation.messages:
        said = any(m["role"] == "user" for m in groups[-1])
        if message["role"] in ("assistant", "tool"):
            if said:
                groups.append([])
            elif len(groups) == 1 and message["role"] == "assistant":
                groups[0].append(message)
        else:
            groups[-1].append(message)
    # What no user turn follows is never asked.
    asked = [group for group in groups if any(m["role"] == "user" for m in group)]
    return Script(asked[0], asked[1:], conversation.tools, thinking, Recorded.of(conversation.messages))
