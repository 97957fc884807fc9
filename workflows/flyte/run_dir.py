"""The directory in which a run leaves its reports: runs/<run_name> here, an output directory in a pod."""

import json
from pathlib import Path
from typing import Any

from flytekit import Deck

from eagle3.files import write_bytes
from workflows.flyte import store

# File systems take 255 bytes.
MAX_NAME_BYTES = 200


def check_run_name(run_name: str) -> None:
    """Refuse a name that cannot be a directory's.

    Raises:
        ValueError: says what it must be.
    """
    is_name = (
        run_name not in ("", ".", "..")
        and not set(run_name) & set("/\\\0")
        and len(run_name.encode()) <= MAX_NAME_BYTES
    )
    if not is_name:
        raise ValueError(
            f"run_name must be the name of a directory in runs/: 1 to {MAX_NAME_BYTES} bytes, neither . nor .., "
            f"without / and \\, got {run_name[:MAX_NAME_BYTES]!r}; choose another"
        )


def run_dir(run_name: str) -> Path:
    """Make a run's directory."""
    check_run_name(run_name)
    out = (Path("runs") / run_name).resolve() if store.is_local() else store.new_dir("summary")
    out.mkdir(parents=True, exist_ok=True)
    return out


def path_for_reader(path: Path) -> str:
    """How a reader finds a file of a run's directory: its path here; in a pod, which ends, its name in the
    task's output."""
    return str(path) if store.is_local() else path.name


def write_text(path: Path, text: str) -> None:
    """Write a file atomically: another run may have the same name."""
    write_bytes(path, text.encode())


def write_data_report(out: Path, report: dict[str, Any]) -> Path:
    """Write data.json and data.html, show the page in the task's Deck, and return its path."""
    from eagle3.reports.data import render_report

    html = render_report(report)
    write_text(out / "data.html", html)
    write_text(out / "data.json", json.dumps(report, indent=1))
    Deck("Data", html)
    return out / "data.html"
