"""Settings, pods and sizes of a run for the tests of plans and of the checks before a run."""

from typing import Any

from eagle3.config.run import RunSettings
from eagle3.planning.workload import SourceSurvey, Workload

GIB = 1 << 30
DISKS = {"data": 200 * GIB, "engine": 400 * GIB, "trainer": 400 * GIB}
WORK = Workload(
    rows=1000,
    shards=4,
    waiting_rows=1000,
    prompt_tokens=100_000,
    new_tokens=400_000,
    tokens=500_000,
    supervised=400_000,
    max_tokens=900_000,
    max_supervised=800_000,
)
SOURCES = [SourceSurvey("train", "counted", 1000, 100_000, 0, 1000, 0, 0.0)]


def settings(**blocks: Any) -> RunSettings:
    """Defaults, changed by `blocks`; the evaluation in bfloat16."""
    given: dict[str, Any] = {"target": {"name": "org/target"}, **blocks}
    given["evaluate"] = {"dtype": "bfloat16", **blocks.get("evaluate", {})}
    return RunSettings.model_validate(given)
