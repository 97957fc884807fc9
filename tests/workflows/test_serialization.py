"""`pyflyte package` serialises everything, and each task says what its pod needs."""

import os
import subprocess
import sys
import tarfile
from typing import Any

import pytest
from flyte_runs import ROOT
from flyteidl.admin.task_pb2 import TaskSpec

UNCACHED = {
    "resolve_inputs",
    "gather_token_shards",
    "gather_hidden_states",
    "regenerate_responses",
    "collect_agent_traces",
    "extract_hidden_states",
    "summarize_run",
    "report_data",
}
ON_GPU = {"regenerate_shard", "collect_shard", "extract_shard", "train_draft", "evaluate_draft"}
WITH_DECK = ON_GPU | {"prepare_data", "report_data", "summarize_run"}


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Task templates by function name, packaged from a directory that is not the repository's."""
    path = tmp_path_factory.mktemp("package")
    program = "from flytekit.clis.sdk_in_container.pyflyte import main; main()"
    command = [sys.executable, "-c", program, "--pkgs", "workflows", "package", "--fast"]
    command += ["--source", str(ROOT), "--output", str(path / "package.tgz")]
    env = os.environ | {"PYTHONPATH": str(ROOT), "HOME": str(path), "EAGLE3_REGISTRY": "ghcr.io/acme"}
    done = subprocess.run(command, cwd=path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {}
    with tarfile.open(path / "package.tgz") as package:
        for member in package.getmembers():
            if member.name.endswith("_1.pb"):
                file = package.extractfile(member)
                assert file is not None
                template = TaskSpec.FromString(file.read()).template
                found[template.id.name.rsplit(".", 1)[-1]] = template
    return found


def test_every_task_is_packaged(templates: dict[str, Any]) -> None:
    assert templates.keys() >= UNCACHED | ON_GPU | {"fetch_target", "prepare_data", "build_vocab", "export_draft", "sample_rows"}


def test_every_task_names_image_requests_and_limits(templates: dict[str, Any]) -> None:
    for name, template in templates.items():
        image, resources = template.container.image, template.container.resources
        assert image.startswith(f"ghcr.io/acme/eagle3-{'gpu' if name in ON_GPU else 'cpu'}:"), name
        requests, limits = ({r.name: r.value for r in side} for side in (resources.requests, resources.limits))
        assert requests.keys() == limits.keys(), name
        assert len(requests) >= 3, name


def test_engine_tasks_ask_for_an_h200_and_are_retried(templates: dict[str, Any]) -> None:
    for name in ON_GPU:
        assert templates[name].extended_resources.gpu_accelerator.device == "nvidia-h200", name
        assert templates[name].metadata.retries.retries > 0, name


def test_long_tasks_and_reports_have_a_deck(templates: dict[str, Any]) -> None:
    assert {name for name, template in templates.items() if template.metadata.generates_deck.value} == WITH_DECK


def test_all_but_a_few_tasks_are_cached_by_a_constant_version(templates: dict[str, Any]) -> None:
    for name, template in templates.items():
        assert template.metadata.discoverable == (name not in UNCACHED), name
        assert template.metadata.discovery_version.isdigit() == (name not in UNCACHED), name


def test_no_path_is_in_a_cache_key(templates: dict[str, Any]) -> None:
    for name, template in templates.items():
        if name in UNCACHED:
            continue
        keyed = set(template.interface.inputs.variables) - set(template.metadata.cache_ignore_input_vars)
        for key in keyed:
            kind = template.interface.inputs.variables[key].type
            title = dict(kind.metadata).get("title", "") if kind.HasField("metadata") else ""
            assert not kind.HasField("blob"), (name, key)
            assert not title or title.endswith("Config"), (name, key)
            assert title != "TargetConfig", (name, key)
