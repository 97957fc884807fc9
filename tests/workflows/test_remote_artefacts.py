"""What a user takes home from a cluster: the summary by `pyflyte fetch`, the draft by the line in it."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from flytekit.clis.sdk_in_container.pyflyte import main

from eagle3.export import verify_export
from tests.flyte_stand_in.object_store import KEY_ID, SECRET
from tests.flyte_stand_in.remote_runs import Cluster, Run
from tests.helpers.flyte_runs import ROOT

pytestmark = [pytest.mark.remote, pytest.mark.slow]


@pytest.fixture(scope="module")
def fetched(cluster: Cluster, first: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory into which `pyflyte fetch` put the summary's files, by the command in the docs."""
    (written,) = re.findall(r"pyflyte (fetch .*)", (ROOT / "docs/cluster.md").read_text())
    command = written.replace("<execution>", first.entries[0].execution)
    out = tmp_path_factory.mktemp("fetched")
    done = CliRunner().invoke(main, shlex.split(command.replace("runs/mine", str(out))))
    assert done.exit_code == 0, (done.output, done.exception)
    return out / "data"


def test_pyflyte_fetches_the_report_of_a_finished_execution(fetched: Path) -> None:
    assert {path.name for path in fetched.iterdir()} == {
        "summary.json",
        "report.html",
        "data.html",
        "data.json",
    }
    assert "Fetch" in (fetched / "report.html").read_text()


def test_the_line_in_the_summary_fetches_what_the_line_below_serves(
    first: Run, fetched: Path, tmp_path: Path
) -> None:
    serve = json.loads((fetched / "summary.json").read_text())["serve"]
    environment = os.environ | {
        "AWS_ENDPOINT_URL": first.plane.store.url,
        "AWS_ACCESS_KEY_ID": KEY_ID,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    for _ in range(2):  # again into what is there
        subprocess.run(
            ["bash", "-euc", serve["Fetch"]], cwd=tmp_path, env=environment, check=True, timeout=120
        )
    words = shlex.split(serve["HTTP server"])
    assert words[:3] == ["vllm", "serve", "target"]
    assert json.loads(words[words.index("--speculative-config") + 1])["model"] == "draft"
    assert {path.name for path in tmp_path.iterdir()} == {"draft", "target"}
    assert verify_export(tmp_path / "draft") == first.output("export_draft")["digest"]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in (tmp_path / "target").iterdir()
    }
