"""A server to talk to."""

from collections.abc import Iterator

import pytest

from tests.target.stand_in import StandIn, stand_in


@pytest.fixture
def server() -> Iterator[StandIn]:
    with stand_in() as s:
        yield s
