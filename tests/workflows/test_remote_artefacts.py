"""What a user of a cluster hands on or takes home: listings of shards by URL, the summary by `pyflyte fetch`, the draft."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from control_plane import control_plane
from flyte_runs import ROOT
from flyteidl.core.literals_pb2 import LiteralMap
from flytekit.clis.sdk_in_container.pyflyte import main
from object_store import KEY_ID, SECRET
from remote_runs import Cluster, Run, succeeded

from eagle3.export import verify_export
from workflows.retrain_eagle3 import retrain_eagle3
from workflows.train_eagle3 import train_eagle3, train_from_shards, train_from_states

pytestmark = [pytest.mark.remote, pytest.mark.slow]
QUICK = {"epochs": 1, "checkpoint_every": 50}
FILE = str(ROOT / "workflows/train_eagle3.py")


def node_of(workflow: Any, task: str) -> str:
    (node,) = (n.id for n in workflow.nodes if n.flyte_entity.name.endswith(f".{task}"))
    return str(node)


def test_the_readme_knows_the_node_of_every_summary() -> None:
    readme = (ROOT / "README.md").read_text()
    said = re.search(r"(n\d+) is `summarize_run` of `(\w+)`; it is (n\d+) of `(\w+)` and `(\w+)`, (n\d+) of `(\w+)`", readme)
    assert said is not None
    nodes = {said[2]: said[1], said[4]: said[3], said[5]: said[3], said[7]: said[6]}
    workflows = (train_eagle3, train_from_shards, train_from_states, retrain_eagle3)
    assert nodes == {w.name.rpartition(".")[2]: node_of(w, "summarize_run") for w in workflows}


@pytest.fixture(scope="module")
def cluster(workplace: Path, tiny_target: Path) -> Iterator[Cluster]:
    with control_plane() as plane, pytest.MonkeyPatch.context() as patch:
        for name, value in plane.environment.items():
            patch.setenv(name, value)
        patch.setenv("DOCKER_HOST", "tcp://127.0.0.1:9")  # no image is looked for or built
        yield Cluster(plane, workplace, tiny_target)


@dataclass(frozen=True)
class Answered:
    """A run that stopped behind regeneration, and the URL of its listing, as its pod's log says it."""

    run: Run
    listing: str


@pytest.fixture(scope="module")
def answered(cluster: Cluster) -> Answered:
    run = succeeded(cluster.pyflyte_run(FILE, "until_regenerate", "--inputs-file", str(cluster.recipe(train=QUICK))))
    (node,) = {entry.node for entry in run.entries if entry.task == "list_token_shards"}
    said = re.search(r"token_shards: 2, listed in (\S+)", run.log(node, attempt=0))
    assert said is not None
    return Answered(run, said[1])


def test_a_listing_is_an_output_at_the_url_that_the_log_says(answered: Answered) -> None:
    run, store = answered.run, answered.run.plane.store
    outputs = store.read_message(f"{run.place_of('list_token_shards')}/0/outputs.pb", LiteralMap)
    assert outputs is not None
    assert outputs.literals["o1"].scalar.blob.uri == answered.listing
    assert answered.listing.startswith("s3://flyte/")
    assert answered.listing.endswith("/token_shards.json")
    content = json.loads(store.read(answered.listing.removeprefix("s3://flyte/")) or b"")
    assert [shard["digest"] for shard in content["shards"]] == [s["digest"] for s in run.output("list_token_shards")["shards"]]
    assert all(shard["place"].startswith("s3://flyte/") for shard in content["shards"])


@pytest.fixture(scope="module")
def trained(cluster: Cluster, answered: Answered) -> Run:
    shards = json.dumps([answered.listing])
    return succeeded(
        cluster.pyflyte_run(FILE, "train_from_shards", "--inputs-file", str(cluster.recipe(train=QUICK)), "--shards", shards)
    )


def test_another_execution_starts_from_a_listing_by_its_url(trained: Run) -> None:
    assert trained.tasks("OK")["regenerate_shard"] == 0
    assert trained.tasks("OK")["extract_shard"] == 2
    assert trained.tasks("OK")["train_draft"] == 1


@pytest.fixture(scope="module")
def fetched(trained: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory into which `pyflyte fetch` put the summary's files, by the command of the README."""
    (written,) = re.findall(r"`pyflyte (fetch [^`]*)`", (ROOT / "README.md").read_text())
    command = written.replace("<execution>", trained.entries[0].execution)
    command = command.replace(f"/{node_of(train_eagle3, 'summarize_run')}/", f"/{node_of(train_from_shards, 'summarize_run')}/")
    out = tmp_path_factory.mktemp("fetched")
    done = CliRunner().invoke(main, shlex.split(command.replace("runs/mine", str(out))))
    assert done.exit_code == 0, (done.output, done.exception)
    return out / "data"


def test_pyflyte_fetches_the_report_of_a_finished_execution(fetched: Path) -> None:
    assert {path.name for path in fetched.iterdir()} == {"summary.json", "report.html", "data.html", "data.json"}
    assert "Fetch" in (fetched / "report.html").read_text()


def test_the_line_in_the_summary_fetches_what_the_line_below_serves(trained: Run, fetched: Path, tmp_path: Path) -> None:
    serve = json.loads((fetched / "summary.json").read_text())["serve"]
    environment = os.environ | {
        "AWS_ENDPOINT_URL": trained.plane.store.url,
        "AWS_ACCESS_KEY_ID": KEY_ID,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    for _ in range(2):  # again into what is there
        subprocess.run(["bash", "-euc", serve["Fetch"]], cwd=tmp_path, env=environment, check=True, timeout=120)
    words = shlex.split(serve["HTTP server"])
    assert words[:3] == ["vllm", "serve", "target"]
    assert json.loads(words[words.index("--speculative-config") + 1])["model"] == "draft"
    assert {path.name for path in tmp_path.iterdir()} == {"draft", "target"}
    assert verify_export(tmp_path / "draft") == trained.output("export_draft")["digest"]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in (tmp_path / "target").iterdir()}
