"""The other workflows through the real `pyflyte run --remote`: a plan, stops and starts, tool tasks, a cache written over."""

import io
import json
import re
from collections import Counter
from typing import Any

import pyarrow.parquet
import pytest
import yaml
from flyteidl.core.literals_pb2 import LiteralMap
from test_agent_traces import TEMPLATE, task

from tests.flyte_stand_in.remote_runs import Cluster, Run, as_dict, succeeded

pytestmark = [pytest.mark.remote, pytest.mark.slow]

UNTIL_EXPORT = Counter(["fetch_target", "prepare_data", "build_vocab", "train_draft", "export_draft"])
UNTIL_EXPORT += Counter({"regenerate_shard": 2, "extract_shard": 2})


def test_a_plan_fetches_no_weights(cluster: Cluster, first: Run) -> None:
    planned = succeeded(cluster.run_workflow("plan", cluster.recipe(), file="plan.py"))
    assert {entry.task for entry in planned.entries} == {"resolve_inputs", "plan_run"}
    content = cluster.plane.store.read(planned.result_literal().scalar.blob.uri)
    assert content is not None
    plan = json.loads(content)
    assert (plan["work"]["rows"], plan["work"]["shards"], plan["heldout"]) == (8, 2, 2)


@pytest.fixture(scope="module")
def answered(cluster: Cluster, first: Run) -> Run:
    """The first run's prompts, answered by the same target, which is in the cluster's store now; stops
    there."""
    for file in cluster.target.iterdir():
        cluster.plane.store.write(f"models/tiny/{file.name}", file.read_bytes())
    recipe = cluster.recipe(target={"name": "s3://flyte/models/tiny", "public_name": "tiny/bytes"})
    return succeeded(cluster.run_workflow("until_regenerate", recipe))


def test_a_target_in_the_clusters_store_is_read_by_its_pods(answered: Run) -> None:
    assert answered.tasks("OK")["fetch_target"] == 1
    shards = answered.output("list_token_shards")["shards"]
    assert [shard["rows"] for shard in shards] == [4, 4]
    assert all(shard["supervised_tokens"] for shard in shards)


@pytest.fixture(scope="module")
def stopped(cluster: Cluster, first: Run) -> Run:
    """The first run's answers again, for their listing."""
    return succeeded(cluster.run_workflow("until_regenerate", cluster.recipe()))


@pytest.fixture(scope="module")
def listing(stopped: Run) -> str:
    """The URL of the answered shards' listing, as the pod's log says it."""
    (node,) = {entry.node for entry in stopped.entries if entry.task == "list_token_shards"}
    said = re.search(r"token_shards: 2, listed in (\S+)", stopped.log(node, attempt=0))
    assert said is not None
    return said[1]


def test_a_listing_is_an_output_at_the_url_that_the_log_says(stopped: Run, listing: str) -> None:
    store = stopped.plane.store
    outputs = store.read_message(f"{stopped.metadata_of('list_token_shards')}/0/outputs.pb", LiteralMap)
    assert outputs is not None
    assert outputs.literals["o1"].scalar.blob.uri == listing
    assert listing.startswith("s3://flyte/")
    content = json.loads(store.read(listing) or b"")
    made = stopped.output("list_token_shards")["shards"]
    assert [shard["digest"] for shard in content["shards"]] == [shard["digest"] for shard in made]
    assert [shard["place"] for shard in content["shards"]] == [shard["file"]["path"] for shard in made]


def start_from(cluster: Cluster, workflow: str, places: list[str]) -> Run:
    recipe = yaml.safe_load(cluster.recipe().read_text())
    del recipe["prompts"]
    path = cluster.workplace / "without_prompts.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return succeeded(cluster.run_workflow(workflow, path, "--shards", json.dumps(places)))


def test_training_from_a_listing_at_a_url_takes_everything_behind_the_shards_from_the_cache(
    cluster: Cluster, listing: str
) -> None:
    run = start_from(cluster, "train_from_shards", [listing])
    hits = run.tasks("CACHE_HIT")
    assert hits == UNTIL_EXPORT - Counter({"prepare_data": 1, "regenerate_shard": 2}) + Counter(
        ["evaluate_draft", "describe_rows"]
    )
    assert run.tasks("OK")["prepare_heldout"] == 1


def test_training_from_hidden_states_at_urls_is_a_cache_hit(cluster: Cluster, first: Run) -> None:
    stopped = succeeded(cluster.run_workflow("until_extract", cluster.recipe()))
    hits = UNTIL_EXPORT - Counter(["train_draft", "export_draft"])
    assert stopped.tasks("CACHE_HIT") == hits
    places = [shard["directory"]["path"] for shard in as_dict(stopped.result_literal())["shards"]]
    assert all(place.startswith("s3://flyte/") for place in places)
    run = start_from(cluster, "train_from_states", places)
    assert run.tasks("CACHE_HIT").keys() >= {"train_draft", "export_draft", "evaluate_draft"}
    assert not run.tasks("OK").keys() & {
        "train_draft",
        "export_draft",
        "evaluate_draft",
        "extract_hidden_states",
    }


def test_an_execution_that_overwrites_the_cache_runs_everything_and_the_next_one_takes_what_it_made(
    cluster: Cluster, first: Run
) -> None:
    """Answers and states lie in the store by key besides: their pods run, find them finished and start no
    engine."""
    recipe = cluster.recipe()
    anew = succeeded(cluster.run_workflow("until_export", recipe, options=["--overwrite-cache"]))
    assert anew.tasks("OK") & UNTIL_EXPORT == UNTIL_EXPORT
    assert not anew.tasks("CACHE_HIT")
    assert not [
        key for key in anew.puts if "eagle3/extract_hidden_states-" in key and key.endswith(".safetensors")
    ]
    made = as_dict(anew.result_literal())
    assert made["digest"] == first.output("export_draft")["digest"]
    assert made["directory"] != first.output("export_draft")["directory"]

    after = succeeded(cluster.run_workflow("until_train", recipe))
    assert after.tasks("CACHE_HIT") == UNTIL_EXPORT - Counter(["export_draft"])
    assert as_dict(after.result_literal()) == anew.output("train_draft")


def test_tool_tasks_are_played_in_a_pod(cluster: Cluster, first: Run) -> None:
    tasks: Any = "".join(json.dumps(task(i)) + "\n" for i in range(3))
    source = {"path": cluster.plane.store.write("sources/tasks.jsonl", tasks.encode()), "name": "tasks"}
    template = cluster.plane.store.write("sources/template.jinja", TEMPLATE.encode())
    sampling = {"tasks": {"temperature": 0.0, "max_new_tokens": 7}}
    regenerate = {"sources": sampling, "tool_parser": "openai"}
    recipe = cluster.recipe(
        num_prompts=1, data={"sources": [source]}, target={"chat_template": template}, regenerate=regenerate
    )
    run = succeeded(cluster.run_workflow("until_regenerate", recipe))
    assert run.states_of("regenerate_shard") == [["OK"], ["OK"]]
    chats, traces = as_dict(run.result_literal())["shards"]
    assert (chats["rows"], traces["rows"]) == (1, 3)
    content = cluster.plane.store.read(traces["file"]["path"])
    assert content is not None
    rows = pyarrow.parquet.read_table(io.BytesIO(content)).to_pylist()
    assert {row["source"] for row in rows} == {"tasks"}
    assert all(2 <= sum(row["loss_mask"]) <= 7 for row in rows)
