"""One preflight: a real run refuses in its first node, before weights are fetched, all that a plan
refuses."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.calls import WEATHER
from tests.helpers.exports import write_exported
from tests.helpers.factories import draft_config, layer_config
from tests.helpers.flyte_runs import pyflyte_run, words, write_prompts, write_recipe
from workflows.flyte import journal, store

pytestmark = pytest.mark.slow

WRONG_MODEL = "other"
DRAFT = "draft"
# Name of the case -> blocks of the recipe, words of the error.
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "lengths": (
        {"engine": {"max_model_len": 80}, "regenerate": {"max_new_tokens": 60}},
        "must not exceed engine.max_model_len 80, got 124; raise it or lower the others",
    ),
    "positions": (
        {"engine": {"max_model_len": 257}},
        "engine.max_model_len must not exceed the target's 256 positions, got 257; lower it",
    ),
    "sampling of an unknown source": (
        {"regenerate": {"sources": {"chats": {"top_p": 0.5}}}},
        "regenerate.sources must name sources of this run (train), got chats; correct the names",
    ),
    "weights of some sources": (
        {"data": {"sources": [{"path": "prompts.jsonl", "name": "more", "weight": 1}]}},
        "either all sources must have a weight above 0, or none, got none for train",
    ),
    "two sources of one name": (
        {"data": {"sources": [{"path": "prompts.jsonl", "name": "train"}]}},
        "every source needs a name of its own, got train twice",
    ),
    "no such source": (
        {"data": {"sources": [{"path": "/nowhere.jsonl"}]}},
        "source /nowhere.jsonl: no such file or directory",
    ),
    "no such target": ({"target": {"name": "/nowhere/at/all"}}, "target /nowhere/at/all: no such directory"),
    "no public name": ({"target": {"public_name": ""}}, "public_name"),
    "architecture": (
        {"target": {"name": WRONG_MODEL}},
        "tiny/bytes is a 'gemma3' model; drafts can be trained for llama",
    ),
    "vocabulary": ({"vocab": {"size": 10**6}}, "lower vocab.size"),
    "layers": ({"extract": {"layer_ids": [1, 9]}}, "extract.layer_ids must be in 0 … 4"),
    "tensor parallel": (
        {"fanout": {"tensor_parallel_size": 3}},
        "divisible by fanout.tensor_parallel_size, got 3",
    ),
    "trainer's GPUs": (
        {"resources": {"trainer": {"gpus": 2}}},
        "train.packs_per_step must be a multiple of resources.trainer.gpus 2, got 1",
    ),
    "trainer's disk": (
        {"resources": {"trainer": {"ephemeral_storage": "100Gi"}}},
        "resources.trainer.ephemeral_storage must hold",
    ),
    "disk budget of chunks": (
        {"train": {"disk_budget_bytes": 1000}},
        "lower train.shuffle_chunks or raise train.disk_budget_bytes",
    ),
    "no such initial draft": ({"train": {"init_from": "runs/absent"}}, "a pod cannot read your directories"),
    "initial draft of other layers": (
        {"train": {"init_from": DRAFT}},
        "the draft of train.init_from does not fit: it reads aux layers [1, 2], the states hold [1, 2, 3]",
    ),
    "unknown parser": ({"regenerate": {"tool_parser": "no_such"}}, "got no_such; correct it"),
    "tools without a parser": (
        {"data": {"sources": [{"path": "tools.jsonl"}]}},
        "rows with tools need regenerate.tool_parser, got none",
    ),
    "shards": ({"data": {"min_shards": 4}}, "4 usable rows fill 1 shards"),
    "rows": (
        {"data": {"sources": [{"path": "bad.jsonl"}]}},
        "bad.jsonl: 2 of the first 2 rows cannot be used, more than data.max_dropped_share = 0.5",
    ),
    "held-out prompts": ({"data": {"max_prompt_tokens": 3}}, "no held-out prompt is left"),
}


@pytest.fixture(scope="module")
def recipe(workplace: Path, tiny_target: Path) -> Callable[..., Path]:
    """Writes a recipe with changed blocks."""
    prompts = write_prompts(workplace / "prompts.jsonl", 0, 4)
    (workplace / "bad.jsonl").write_text('{"messages": 7}\n' * 2)
    (workplace / "tools.jsonl").write_text(json.dumps({"prompt": "Look.", "tools": [WEATHER]}) + "\n")
    shutil.copytree(tiny_target, workplace / WRONG_MODEL)
    config = json.loads((tiny_target / "config.json").read_text()) | {"model_type": "gemma3"}
    (workplace / WRONG_MODEL / "config.json").write_text(json.dumps(config))
    (workplace / "made").mkdir()
    (workplace / "made" / "target").symlink_to(tiny_target)
    layer = layer_config(vocab_size=config["vocab_size"])
    other = draft_config(layer, eagle_aux_hidden_state_layer_ids=[1, 2])
    write_exported(workplace / "made", other, 3).rename(workplace / DRAFT)
    return lambda **blocks: write_recipe(workplace / "recipe.yaml", tiny_target, prompts, **blocks)


@pytest.mark.parametrize("workflow", ["plan", "train_eagle3"])
@pytest.mark.parametrize("case", CASES)
def test_a_run_refuses_in_its_first_node_what_a_plan_refuses(
    recipe: Callable[..., Path], case: str, workflow: str
) -> None:
    blocks, complaint = CASES[case]
    said = words(pyflyte_run(recipe(**blocks), f"{workflow}.py", workflow))
    assert complaint in said
    assert "resolve_inputs" in said
    assert not journal.entries()
    assert not list(store.root().glob("*"))


@pytest.mark.parametrize("case", ["positions", "architecture", "vocabulary", "tensor parallel"])
def test_a_run_from_shards_refuses_settings_before_it_reads_them(
    recipe: Callable[..., Path], case: str
) -> None:
    blocks, complaint = CASES[case]
    more = ["--shards", '["nowhere.parquet"]']
    assert complaint in words(pyflyte_run(recipe(**blocks), workflow="train_from_shards", more=more))
    assert not journal.entries()
    assert not list(store.root().glob("*"))
