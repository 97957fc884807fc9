"""Source files beside a target directory, to be prepared."""

import json
from pathlib import Path
from typing import Any

from eagle3.config.data import DataConfig, SourceConfig
from eagle3.data.conversations import Conversation, Message, to_conversation
from eagle3.data.prepare import PreparedFiles, prepare_shards
from eagle3.shards.tokens import TokenRow, read_token_shard

HELDOUT = [{"prompt": "held out"}]
CHAT = {
    "messages": [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
        {"role": "assistant", "content": "four"},
    ]
}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


class Workplace:
    """A target directory and source files to prepare."""

    def __init__(self, root: Path, tokenizer_dir: Path) -> None:
        self.root, self.tokenizer_dir, self.out_dir = root, tokenizer_dir, root / "out"

    def prepare(
        self,
        rows: list[dict[str, Any]],
        regenerate: bool = True,
        heldout: list[dict[str, Any]] = HELDOUT,
        **settings: Any,
    ) -> PreparedFiles:
        source = SourceConfig(path=str(write_rows(self.root / "train.jsonl", rows)))
        return self.prepare_sources([source], regenerate, heldout, **settings)

    def prepare_sources(
        self,
        sources: list[SourceConfig],
        regenerate: bool = True,
        heldout: list[dict[str, Any]] = HELDOUT,
        **settings: Any,
    ) -> PreparedFiles:
        heldout_source = SourceConfig(path=str(write_rows(self.root / "heldout.jsonl", heldout)))
        cfg = DataConfig(sources=sources, **settings)
        return prepare_shards(heldout_source, self.tokenizer_dir, cfg, regenerate, self.out_dir)

    def written(self) -> list[str]:
        return sorted(p.name for p in self.out_dir.iterdir()) if self.out_dir.exists() else []


def all_rows(prepared: PreparedFiles) -> list[TokenRow]:
    return [row for file in prepared.shards for row in read_token_shard(file.path)]


def messages_of(row: dict[str, Any]) -> list[Message]:
    conversation = to_conversation(row)
    assert isinstance(conversation, Conversation)
    return conversation.messages
