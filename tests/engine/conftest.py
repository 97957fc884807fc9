"""Engine tests share a worker process, which imports vLLM for 16 CPU-seconds; here it records what the engine proposes, too.

It ends with the session, or when a test wants another library's. Where vLLM is not installed (it runs on Linux x86-64 here),
engine tests are skipped and say so.
"""

import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if find_spec("vllm") is None:
        for item in items:
            if item.get_closest_marker("engine"):
                item.add_marker(
                    pytest.mark.skip(reason="vLLM is not installed: it has no package for this platform")
                )


@pytest.fixture(scope="module", autouse=True)
def _recording_worker() -> Iterator[None]:
    start = subprocess.Popen

    def start_recording(command: list[str], *args: Any, **kwargs: Any) -> Any:
        names = {"eagle3.engine.worker": "tests.helpers.recording_worker"}
        return start([names.get(word, word) for word in command], *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", start_recording)
        yield
