"""The engine's worker process, which also records what the engine proposes after every step: into proposals.jsonl of its draft.

A line is [token ids so far, proposed token ids]. Run in the place of eagle3.engine.worker by the fixture in conftest.py.
"""

import json
import sys
from pathlib import Path
from typing import Any

from eagle3.engine import worker

build = worker._build


def build_recorded(settings: dict[str, Any]) -> Any:
    built = build(settings)
    if settings["draft_dir"] and hasattr(built, "engine"):
        record(built.engine, Path(settings["draft_dir"]) / "proposals.jsonl")
    return built


def record(engine: Any, path: Path) -> None:
    step, scheduler = engine.step, engine.engine_core.engine_core.scheduler

    def step_and_record() -> Any:
        outputs = step()
        proposals = [
            [list(r.all_token_ids), list(r.spec_token_ids)]
            for r in scheduler.requests.values()
            if r.spec_token_ids
        ]
        with open(path, "a") as f:
            f.writelines(json.dumps(proposal) + "\n" for proposal in proposals)
        return outputs

    engine.step = step_and_record


if __name__ == "__main__":
    worker._build = build_recorded
    worker.main(sys.argv[1])
