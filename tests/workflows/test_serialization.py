"""`pyflyte package` serialises everything, and each task says what its pod needs."""

import os
import re
import subprocess
import sys
import tarfile
from typing import Any

import pytest
from flyteidl.admin.task_pb2 import TaskSpec
from flyteidl.admin.workflow_pb2 import WorkflowSpec
from flyteidl.core.security_pb2 import Secret
from flyteidl.core.tasks_pb2 import Resources

from eagle3.config.resources import quantity_bytes
from tests.helpers.flyte_runs import ROOT
from workflows.flyte import pods as resources

pytestmark = pytest.mark.slow

UNCACHED = {
    "resolve_inputs",
    "gather_token_shards",
    "gather_hidden_states",
    "regenerate_responses",
    "extract_hidden_states",
    "summarize_run",
    "report_data",
    "show_data",
    "plan_run",
    "fetch_target_node",
    "prepare_data_node",
    "train_draft_node",
    "evaluate_draft_node",
    "resolve_without_data",
    "take_token_shards",
    "take_hidden_states",
    "join_token_shards",
    "list_token_shards",
    "list_hidden_states",
    "find_current_draft",
    "check_current_draft",
    "choose_opponent",
    "promote_draft",
}
ON_GPU = {"regenerate_shard", "extract_shard", "train_draft", "evaluate_draft"}
CARRIED = {
    "EAGLE3_REGISTRY": "ghcr.io/acme",
    "EAGLE3_TAG": "v1",
    "EAGLE3_HF_SECRET": "hf/token",
    "EAGLE3_SERVER_SECRET": "vllm/key",
}
READ_THE_HUB = {
    "resolve_inputs",
    "resolve_without_data",
    "fetch_target",
    "fetch_tokenizer",
    "prepare_data",
    "build_vocab",
    "train_draft",
    "find_current_draft",
}
WITH_DECK = ON_GPU | {"prepare_data", "show_data", "summarize_run", "plan_run"}


@pytest.fixture(scope="module")
def packaged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Everything that is packaged, by file name, from a directory that is not the repository's."""
    path = tmp_path_factory.mktemp("package")
    program = "from flytekit.clis.sdk_in_container.pyflyte import main; main()"
    command = [sys.executable, "-c", program, "--pkgs", "workflows", "package", "--fast"]
    command += ["--source", str(ROOT), "--output", str(path / "package.tgz")]
    env = os.environ | {"PYTHONPATH": str(ROOT), "HOME": str(path)} | CARRIED | {"EAGLE3_STORE": str(path)}
    done = subprocess.run(command, cwd=path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {}
    with tarfile.open(path / "package.tgz") as package:
        for member in package.getmembers():
            if member.name.endswith(".pb"):
                file = package.extractfile(member)
                assert file is not None
                found[member.name] = file.read()
    return found


@pytest.fixture(scope="module")
def templates(packaged: dict[str, bytes]) -> dict[str, Any]:
    """Task templates by function name."""
    found = [
        TaskSpec.FromString(content).template for name, content in packaged.items() if name.endswith("_1.pb")
    ]
    return {template.id.name.rsplit(".", 1)[-1]: template for template in found}


def test_every_workflow_is_packaged(packaged: dict[str, bytes]) -> None:
    specs = [WorkflowSpec.FromString(content) for name, content in packaged.items() if name.endswith("_2.pb")]
    names = {spec.template.id.name for spec in specs}
    drivers = ["train_eagle3", *(f"until_{stage}" for stage in ("regenerate", "extract", "train", "export"))]
    drivers += ["train_from_shards", "train_from_states"]
    expected = {f"train_eagle3.{driver}" for driver in drivers}
    expected |= {"prepare_data.prepare_shards", "plan.plan", "retrain_eagle3.retrain_eagle3"}
    assert names == {f"workflows.{name}" for name in expected}
    for spec in specs:
        assert "recipe" in spec.template.interface.inputs.variables


def test_the_docs_give_the_limits_that_a_cluster_must_allow(templates: dict[str, Any]) -> None:
    found = re.search(
        r"at least (\d+) cores, (\d+Gi) of memory, (\d+Gi) of local disk and (\d) GPU",
        (ROOT / "docs/cluster.md").read_text(),
    )
    assert found
    said = dict(zip(("CPU", "MEMORY", "EPHEMERAL_STORAGE", "GPU"), found.groups(), strict=True))
    limits = [entry for template in templates.values() for entry in template.container.resources.limits]
    for name, most in said.items():
        asked = [
            quantity_bytes(entry.value) for entry in limits if Resources.ResourceName.Name(entry.name) == name
        ]
        assert max(asked) == quantity_bytes(most)


def test_only_regeneration_and_extraction_run_on_spot(templates: dict[str, Any]) -> None:
    spot = {name for name, template in templates.items() if template.metadata.interruptible}
    assert spot == {"regenerate_shard", "extract_shard"}
    assert all(templates[name].metadata.retries.retries for name in spot)


def test_every_task_is_packaged(templates: dict[str, Any]) -> None:
    assert templates.keys() >= UNCACHED | ON_GPU | {
        "fetch_target",
        "prepare_data",
        "prepare_heldout",
        "build_vocab",
        "export_draft",
        "describe_rows",
    }


def test_every_task_names_image_requests_and_limits(templates: dict[str, Any]) -> None:
    for name, template in templates.items():
        image, resources = template.container.image, template.container.resources
        assert image.startswith(f"ghcr.io/acme/eagle3-{'gpu' if name in ON_GPU else 'cpu'}:"), name
        requests, limits = (
            {r.name: r.value for r in side} for side in (resources.requests, resources.limits)
        )
        assert requests.keys() == limits.keys(), name
        assert len(requests) >= 3, name
        assert template.metadata.timeout.seconds > 0, name


def test_engine_tasks_ask_for_an_h200_and_are_retried(templates: dict[str, Any]) -> None:
    for name in ON_GPU:
        assert templates[name].extended_resources.gpu_accelerator.device == "nvidia-h200", name
        assert templates[name].metadata.retries.retries > 0, name


def test_every_task_is_tried_again(templates: dict[str, Any]) -> None:
    retries = {name: template.metadata.retries.retries for name, template in templates.items()}
    assert retries == {name: 3 if name in ON_GPU else 2 for name in templates}


def test_long_tasks_and_reports_have_a_deck(templates: dict[str, Any]) -> None:
    assert {
        name for name, template in templates.items() if template.metadata.generates_deck.value
    } == WITH_DECK


def test_pods_know_the_registry_and_secrets_that_their_own_nodes_need(templates: dict[str, Any]) -> None:
    for name, template in templates.items():
        environment = {pair.key: pair.value for pair in template.container.env}
        assert environment.items() >= CARRIED.items(), name
        assert "EAGLE3_STORE" not in environment, name  # a directory of this machine


def test_only_tasks_that_need_a_secret_get_it(templates: dict[str, Any]) -> None:
    found = {
        name: {(s.group, s.key, s.env_var, s.mount_requirement) for s in template.security_context.secrets}
        for name, template in templates.items()
    }
    token, key = (
        ("hf", "token", "HF_TOKEN", Secret.ENV_VAR),
        ("vllm", "key", "EAGLE3_SERVER_KEY", Secret.ENV_VAR),
    )
    assert {name for name, secrets in found.items() if token in secrets} == READ_THE_HUB
    assert {name for name, secrets in found.items() if key in secrets} == {"regenerate_shard"}
    assert all(len(secrets) <= 1 for secrets in found.values())


def test_no_secret_is_asked_for_unless_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EAGLE3_HF_SECRET", raising=False)
    assert resources.secret("EAGLE3_HF_SECRET", "HF_TOKEN") == {}
    monkeypatch.setenv("EAGLE3_HF_SECRET", "hf_abcdef")
    with pytest.raises(ValueError, match="EAGLE3_HF_SECRET must read group/key"):
        resources.secret("EAGLE3_HF_SECRET", "HF_TOKEN")
    monkeypatch.setenv("EAGLE3_STORE", "s3://bucket/drafts")
    assert resources.carried_environment()["EAGLE3_STORE"] == "s3://bucket/drafts"


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
            assert title not in ("TargetConfig", "ResourcesConfig", "FanOutConfig"), (name, key)
