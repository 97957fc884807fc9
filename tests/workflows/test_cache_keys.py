"""What is in the key of each cached task, and what runs again after which change of a recipe: this much, and
never less.

Every field of every block has a line in CHANGES, with a value that is not the base recipe's and the stages
that run again.
"""

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import yaml
from safetensors.torch import load_file, save_file
from test_agent_traces import task

from eagle3.config.reference import is_unkeyed
from eagle3.config.resources import ResourcesConfig
from eagle3.config.run import RunSettings
from tests.helpers.flyte_runs import all_tasks, write_prompts
from tests.helpers.stand_in_stages import (
    DRAFT,
    EXCLUDED,
    OTHER_TARGET,
    OTHER_TEMPLATE,
    SOURCES,
    Chain,
    initial_draft,
    run,
    standing_in,
    write_rows,
)

pytestmark = pytest.mark.slow

ANSWERING = {"shard_digest", "target_digest", "engine", "regenerate"}
KEYED = {
    "fetch_target": {"target_digest"},
    "fetch_tokenizer": {"target_digest"},
    "prepare_data": {
        "prompts_digest",
        "source_versions",
        "heldout_digest",
        "target_digest",
        "data",
        "regenerate",
    },
    "prepare_heldout": {"heldout_digest", "target_digest", "data"},
    "regenerate_shard": ANSWERING,
    "build_vocab": {"shards_digest", "target_digest", "vocab", "init_digest"},
    "extract_shard": {"shard_digest", "target_digest", "engine", "extract"},
    "train_draft": {"states_digest", "vocab_digest", "target_digest", "init_digest", "train"},
    "export_draft": {"checkpoint_digest", "vocab_digest", "target_digest", "public_name", "export"},
    "evaluate_draft": {"draft_digest", "heldout_digest", "target_digest", "engine", "evaluate"},
    "describe_rows": {"shards_digest", "target_digest"},
}
# Why an input is in no key though no digest of its own is.
LEFT_OUT = {
    "ref": "name and revision of what target_digest is the content of",
    "init_from": "a place, whose content init_digest is",
    "recipe": "the keyed blocks with the URIs, and where and how a stage runs",
    "server_url": "who answers",
    "tensor_parallel_size": "on how many GPUs",
}

EVALUATED = {"evaluate_draft"}
EXPORTED = {"export_draft"} | EVALUATED
TRAINED = {"train_draft"} | EXPORTED
EXTRACTED = {"extract_hidden_states"} | TRAINED
CHOSEN = {"build_vocab"} | TRAINED
ROWS = {"build_vocab", "describe_rows"} | EXTRACTED
ANSWERED = {"regenerate_responses"} | ROWS
ALL = {"fetch_target", "prepare_data"} | ANSWERED
# What the stand-ins make is the same by another engine and for another target.
ENGINES = {"regenerate_responses", "extract_hidden_states", "evaluate_draft"}
PREPARED = {"prepare_data"}  # the rows are the same, so nothing behind runs
NONE: set[str] = set()
POD = {"cpu": "2", "mem": "8Gi", "ephemeral_storage": "900Gi", "pod_template": "pool"}

CHANGES: dict[str, dict[str, tuple[Any, set[str]]]] = {
    "target": {
        "name": (OTHER_TARGET, ALL),
        "revision": ("main", NONE),  # of a hub id; its commit is in target_digest
        "public_name": ("tiny/other", EXPORTED),
        "chat_template": (OTHER_TEMPLATE, ALL),
    },
    "engine": {
        name: (value, ENGINES)
        for name, value in {
            "engine": "vllm",
            "dtype": "bfloat16",
            "max_model_len": 130,
            "max_num_seqs": 9,
            "max_num_batched_tokens": 257,
            "gpu_memory_utilization": 0.8,
            "cpu_kv_cache_gib": 2,
            "enforce_eager": True,
        }.items()
    },
    "data": {
        "sources": (
            [SOURCES[0] | {"max_rows": 1}, SOURCES[1]],
            {"prepare_data", "regenerate_responses"} | ROWS,
        ),
        "excluded": ([{"path": EXCLUDED}], PREPARED),
        "max_prompt_tokens": (63, PREPARED),
        "max_tokens": (127, PREPARED),
        "rows_per_shard": (3, ALL - {"fetch_target"}),
        "min_shards": (2, PREPARED),
        "max_dropped_share": (0.4, PREPARED),
        "seed": (1, PREPARED),
        "workers": (1, NONE),  # how many processes tokenize
    },
    "regenerate": {
        "enabled": (False, PREPARED | ROWS),
        "temperature": (0.5, ANSWERED),
        "top_p": (0.9, ANSWERED),
        "max_new_tokens": (13, ANSWERED),
        "sources": (
            {"tasks": {"temperature": 0.1}, "train": {"top_p": 0.8}},
            {"regenerate_responses"} | ROWS,
        ),
        "max_tool_rounds": (7, ANSWERED),
        "tool_parser": ("mistral", ANSWERED),
        "reasoning_parser": ("qwen3", ANSWERED),
        "seed": (1, ANSWERED),
    },
    "vocab": {"size": (80, CHOSEN)},
    "extract": {
        "layer_ids": ([0, 1, 2], EXTRACTED),
        "encoding": ("fp16", EXTRACTED),
        "compression": ("none", EXTRACTED),
        "chunk_bytes": (1 << 20, EXTRACTED),
    },
    "train": {
        name: (value, TRAINED)
        for name, value in {
            "ttt_steps": 2,
            "step_decay": 0.5,
            "loss": "lk_hybrid",
            "lk_eta": 2.0,
            "averaging": "conversation",
            "epochs": 2,
            "pack_tokens": 64,
            "packs_per_step": 3,
            "shuffle_chunks": 4,
            "optimizer": "muon",
            "learning_rate": 2e-3,
            "muon_learning_rate": 1e-2,
            "weight_decay": 0.1,
            "beta1": 0.8,
            "beta2": 0.9,
            "warmup_share": 0.1,
            "schedule": "linear",
            "max_grad_norm": 2.0,
            "head": "random",
            "norm_before_residual": False,
            "norm_before_fc": True,
            "fc_norm": True,
            "norm_output": True,
            "validation_rows": 3,
            "validate_every": 5,
            "keep": "last",
            "dtype": "bfloat16",
            "seed": 1,
        }.items()
    }
    | {
        "init_from": (DRAFT, CHOSEN),
        "init_revision": ("main", NONE),  # of a hub id; its commit is init_digest
        "checkpoint_every": (7, NONE),  # what a kill costs
        "device": ("auto", NONE),  # where; the dtype is given
        "processes": (2, NONE),  # who trains which packs of a step
        "disk_budget_bytes": (1 << 37, NONE),  # how many chunks are kept
    },
    "export": {"num_speculative_tokens": (4, EXPORTED), "dtype": ("float32", EXPORTED)},
    "evaluate": {
        "num_speculative_tokens": (2, EVALUATED),
        "max_new_tokens": (5, EVALUATED),
        "dtype": ("bfloat16", EVALUATED),
        "concurrency": (2, EVALUATED),
    },
    "fanout": {  # where, and how many at once
        "replicas": (1, NONE),
        "tensor_parallel_size": (2, NONE),
        "server_urls": (["http://localhost:1"], NONE),
    },
    "resources": {  # on which machines
        "engine": (POD | {"accelerator": "H100", "shared_memory": "1Gi", "spot": False}, NONE),
        "trainer": (POD | {"accelerator": "H100", "shared_memory": "1Gi", "spot": True, "gpus": 2}, NONE),
        "data": (POD | {"spot": True}, NONE),
    },
}
KEEPS_BY_KEY = {"regenerate_responses", "extract_hidden_states", "train_draft"}


@pytest.fixture(scope="module")
def chain(workplace: Path, tiny_target: Path) -> Iterator[Chain]:
    with standing_in() as here:
        yield Chain(workplace, tiny_target, here)


def test_the_page_of_settings_marks_those_that_are_in_no_key() -> None:
    marked = {(block, name) for block, names in CHANGES.items() for name in names if is_unkeyed(block, name)}
    unkeyed = {(block, name) for block, names in CHANGES.items() for name in names if names[name][1] == NONE}
    # Of a hub id; keys hold the commit.
    assert unkeyed - marked == {("target", "revision"), ("train", "init_revision")}
    assert marked <= unkeyed


def cached_tasks() -> dict[str, Any]:
    """By name."""
    return {task.name.rpartition(".")[2]: task for task in all_tasks() if task.metadata.cache}


def test_keys_hold_what_they_should_and_what_is_left_out_has_a_reason() -> None:
    inputs = {name: set(task.interface.inputs) for name, task in cached_tasks().items()}
    ignored = {name: set(task.metadata.cache_ignore_input_vars) for name, task in cached_tasks().items()}
    assert {name: inputs[name] - ignored[name] for name in inputs} == KEYED
    without_digest = {
        entry for name in KEYED for entry in ignored[name] if f"{entry}_digest" not in KEYED[name]
    }
    assert without_digest == LEFT_OUT.keys()


def test_every_setting_has_its_line() -> None:
    blocks = get_type_hints(RunSettings)
    assert {key: set(blocks[key].model_fields) for key in RunSettings.model_fields} == {
        key: set(fields) for key, fields in CHANGES.items()
    }
    for pod, (asked, _) in CHANGES["resources"].items():
        assert asked.keys() == type(getattr(ResourcesConfig(), pod)).model_fields.keys()


def test_the_first_run_makes_everything(chain: Chain) -> None:
    shards = Counter(regenerate_responses=4, extract_hidden_states=4)
    assert chain.base.made == Counter(dict.fromkeys(ALL, 1)) | shards
    assert not chain.base.cached
    assert chain.base.places.keys() == KEEPS_BY_KEY


@pytest.mark.parametrize(
    ("block", "name"), [(block, name) for block, fields in CHANGES.items() for name in fields]
)
def test_a_changed_setting_runs_the_stages_that_it_decides_and_no_other(
    chain: Chain, block: str, name: str
) -> None:
    value, expected = CHANGES[block][name]
    if value == DRAFT:
        value = str(initial_draft(chain))
    ran = chain.run(**{block: {name: value}})
    assert set(ran.made) == expected
    for stage in KEEPS_BY_KEY & expected:  # what the base run has left unfinished would be another result's
        assert ran.places[stage]
        assert not ran.places[stage] & chain.base.places[stage]


def test_appended_prompts_are_answered_and_captured_in_new_shards_only(chain: Chain) -> None:
    ran = chain.run(num_prompts=9)
    assert ran.made == Counter(dict.fromkeys(PREPARED | ROWS, 1)) | Counter(
        regenerate_responses=2, extract_hidden_states=2
    )
    assert (ran.cached["regenerate_responses"], ran.cached["extract_hidden_states"]) == (3, 3)


def test_an_initial_draft_of_the_same_vocabulary_with_other_weights_trains_anew(chain: Chain) -> None:
    one, other = initial_draft(chain), chain.workplace / "draft_retrained"
    chain.run(train={"init_from": str(one)})
    shutil.copytree(one, other)
    assert not chain.run(train={"init_from": str(other)}).made  # the same by another path
    tensors = load_file(other / "model.safetensors")
    runs = []
    for factor in (2, 3):
        save_file(tensors | {"fc.weight": tensors["fc.weight"] * factor}, other / "model.safetensors")
        runs.append(chain.run(train={"init_from": str(other)}))
        assert set(runs[-1].made) == CHOSEN
    assert len({ran.inputs["draft_vocab"].digest for ran in runs}) == 1
    assert len(set.union(*(ran.places["train_draft"] for ran in runs))) == 2


def test_other_heldout_prompts_are_prepared_and_measured(chain: Chain) -> None:
    write_prompts(chain.workplace / "others.jsonl", 200, 203)
    ran = chain.run(heldout="others.jsonl")
    assert set(ran.made) == PREPARED | EVALUATED


def test_a_sources_content_is_in_the_key_and_its_place_is_not(chain: Chain) -> None:
    (chain.workplace / "moved").mkdir()
    shutil.copy(chain.workplace / "tasks.jsonl", chain.workplace / "moved" / "other.jsonl")
    moved = {"sources": [SOURCES[0], {"path": "moved/other.jsonl", "name": "tasks"}]}
    assert not chain.run(data=moved).made
    write_rows(chain.workplace / "moved" / "other.jsonl", [task(i) for i in range(3)])
    assert set(chain.run(data=moved).made) == PREPARED | {"regenerate_responses"} | ROWS


def test_the_order_of_keys_in_a_recipe_is_in_no_key(chain: Chain) -> None:
    """Two weighted sources share shards, and each is sampled in its own way."""
    write_rows(chain.workplace / "more.jsonl", [{"prompt": f"Ask {i}."} for i in range(6)])
    mixed = [{"path": f"{name}.jsonl", "name": name, "weight": 1} for name in ("chats", "more")]
    sampling = {"chats": {"top_p": 0.7, "temperature": 0.4}, "more": {"temperature": 0.2}}
    recipe = chain.write(data={"sources": mixed}, regenerate={"sources": sampling})
    settings = yaml.safe_load(recipe.read_text())
    del settings["prompts"]
    recipe.write_text(yaml.safe_dump(settings, sort_keys=False))
    first = run(chain.here, recipe)
    assert any(len(shard.sources) == 2 for shard in first.inputs["prepared"].shards)
    recipe.write_text(yaml.safe_dump(turned(settings), sort_keys=False))
    assert not run(chain.here, recipe).made


def turned(value: Any) -> Any:
    """The same with all mappings in reverse order."""
    return {key: turned(own) for key, own in reversed(value.items())} if isinstance(value, dict) else value


def test_what_is_made_anew_goes_on_where_its_key_says_wherever_and_however_it_runs(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLYTE_LOCAL_CACHE_OVERWRITE", "true")
    how = ("device", "checkpoint_every", "processes", "disk_budget_bytes")
    changes = {
        block: {name: value for name, (value, _) in CHANGES[block].items()}
        for block in ("fanout", "resources")
    }
    again = chain.run(train={name: CHANGES["train"][name][0] for name in how}, **changes)
    assert again.made == chain.base.made
    assert again.places == chain.base.places
