"""A server to talk to, and what its clients need."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle3.engine.server import client
from tests.helpers.vllm_server import END, StandIn, stand_in


@pytest.fixture
def server() -> Iterator[StandIn]:
    with stand_in() as s:
        yield s


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that do not wait long before they ask again."""
    monkeypatch.setattr(client, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(client, "LONGEST_PAUSE_S", 0.01)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """All that an engine whose server holds the target reads of it."""
    config = {"eos_token_id": END}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path
