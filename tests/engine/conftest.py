"""Where vLLM is not installed (it runs on Linux x86-64 here), engine tests are skipped with a reason."""

from importlib.util import find_spec

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if find_spec("vllm") is None:
        for item in items:
            if item.get_closest_marker("engine"):
                item.add_marker(
                    pytest.mark.skip(reason="vLLM is not installed: it has no package for this platform")
                )
