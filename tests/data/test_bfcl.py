"""BFCL's own files through the preset: every row becomes a conversation with tools."""

import json
from pathlib import Path

import pytest

from eagle3.config.data import SourceConfig
from eagle3.data.conversations import Conversation, to_conversation
from eagle3.data.presets import PRESETS
from eagle3.data.sources import read_source
from eagle3.regenerate.tool_calls import JSON_TYPES

PLACE = Path(__file__).parents[2] / "runs" / "bfcl"
ROWS = {"simple_python": 400, "multiple": 200, "parallel": 200, "parallel_multiple": 200}


def schemas_in(schema: object) -> list[dict[str, object]]:
    """The schema and those of its properties and items."""
    if not isinstance(schema, dict):
        return []
    properties = schema.get("properties")
    parts = [schema.get("items"), *(properties.values() if isinstance(properties, dict) else [])]
    return [schema, *(s for part in parts for s in schemas_in(part))]


@pytest.mark.skipif(not (PLACE / "fetched").exists(), reason="needs BFCL's files; make test fetches them")
@pytest.mark.parametrize(("category", "num_rows"), ROWS.items())
def test_every_row_of_bfcl_is_kept_with_its_tools(category: str, num_rows: int) -> None:
    (path,) = PLACE.glob(f"BFCL_v[0-9]_{category}.json")
    conversations = []
    for record in read_source(SourceConfig(path=str(path), preset="bfcl")):
        assert record.row is not None, record
        conversation = to_conversation(PRESETS["bfcl"].map_row(record.row))
        assert isinstance(conversation, Conversation)
        asked = [m["content"] for turn in record.row["question"] for m in turn]
        assert [m["content"] for m in conversation.messages] == asked
        assert [t["function"]["name"] for t in conversation.tools or []] == [
            f["name"] for f in record.row["function"]
        ]
        conversations.append(conversation)
    assert len(conversations) == num_rows
    schemas = [
        s for c in conversations for t in c.tools or [] for s in schemas_in(t["function"]["parameters"])
    ]
    assert {s["type"] for s in schemas if "type" in s} <= JSON_TYPES.keys()
    assert sum("type" in s for s in schemas) > 0.99 * len(schemas)
    assert '"dict"' not in json.dumps([c.tools for c in conversations])
