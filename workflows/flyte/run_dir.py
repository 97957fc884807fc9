"""The directory of a run's reports: runs/<run_name> locally, an output directory in a pod."""

import json
from pathlib import Path
from typing import Any

from flytekit import Deck

from eagle3.files import write_bytes
from workflows.flyte import store

MAX_NAME_BYTES = 200  # file systems allow 255


def check_run_name(run_name: str) -> None:
    """Refuse a name that cannot be a directory's."""
    is_reserved = run_name in ("", ".", "..") or bool(set(run_name) & set("/\\\0"))
    if is_reserved or len(run_name.encode()) > MAX_NAME_BYTES:
        raise ValueError(
            f"run_name must be the name of a directory in runs/: 1 to {MAX_NAME_BYTES} bytes, neither . nor "
            f".., without / and \\, got {run_name[:MAX_NAME_BYTES]!r}; choose another"
        )


def run_dir(run_name: str) -> Path:
    """Make a run's directory."""
    check_run_name(run_name)
    out = (Path("runs") / run_name).resolve() if store.is_local() else store.new_dir("summary")
    out.mkdir(parents=True, exist_ok=True)
    return out


def path_for_reader(path: Path) -> str:
    """The name under which a report mentions a file: its path locally, its name in the task's output in a
    pod."""
    return str(path) if store.is_local() else path.name


def write_text(path: Path, text: str) -> None:
    """Write a file atomically, since two runs may have the same name."""
    write_bytes(path, text.encode())


def write_data_report(out: Path, report: dict[str, Any]) -> Path:
    """Write data.json and data.html, show the page in the task's Deck, and return its path."""
    from eagle3.reports.data import render_report

    html = render_report(report)
    write_text(out / "data.html", html)
    write_text(out / "data.json", json.dumps(report, indent=1))
    Deck("Data", html)
    return out / "data.html"
