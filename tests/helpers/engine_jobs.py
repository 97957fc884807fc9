"""The engine's process as tests see it, and jobs that change the engine in it."""

import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

from eagle3.engine import engine, progress
from eagle3.engine.interface import EngineSettings
from eagle3.engine.progress import Report, Watch


def engine_pid() -> int:
    """The process that holds the engine."""
    (pid,) = [child.pid for child in multiprocessing.active_children() if child.name == "engine"]
    assert pid is not None
    return pid


def is_running(pid: int) -> bool:
    """True unless the process is gone or only waits for its exit status to be read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def report_always(settings: EngineSettings) -> None:
    """Let the engine with these settings report at every opportunity instead of once a second."""
    engine.run(settings, _report_always, Watch("report always"))


def _report_always(engine: Any, report: Report) -> None:
    progress.REPORT_EVERY_S = 0


def record_proposals(engine: Any, report: Report, path: Path) -> None:
    """After every step write a line for every request: [token ids so far, proposed token ids]."""
    llm_engine = engine.engine
    step, scheduler = llm_engine.step, llm_engine.engine_core.engine_core.scheduler

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

    llm_engine.step = step_and_record


def print_to_stdout(engine: Any, report: Report) -> None:
    """As a library written in C does."""
    os.write(1, b"noise\n")


def report_often(engine: Any, report: Report, count: int) -> None:
    """Send `count` reports at once."""
    progress.REPORT_EVERY_S = 0
    numbers = iter(range(count + 2))
    report.start(count, "answers", numbers.__next__)
    for _ in range(count):
        report.send_if_due()
