"""Settings that cannot work together are refused before anything runs."""

import json
import re
from contextlib import nullcontext
from typing import Any

import pytest
from pydantic import ValidationError

from eagle3.config.base import StageConfig
from eagle3.config.checks import check_lengths, check_sampled_sources
from eagle3.config.data import DataConfig, SourceConfig
from eagle3.config.engine import (
    EngineConfig,
    EvaluateConfig,
    FanOutConfig,
    RegenerateConfig,
    SamplingConfig,
    TargetConfig,
)
from eagle3.config.training import PromoteConfig, TrainConfig

ENGINE = EngineConfig(max_model_len=100)


def test_lengths_that_fit_pass() -> None:
    check_lengths(
        DataConfig(max_prompt_tokens=60, max_tokens=500),
        ENGINE,
        RegenerateConfig(max_new_tokens=40),
        EvaluateConfig(max_new_tokens=34, num_speculative_tokens=3),
    )


@pytest.mark.parametrize(
    ("regenerate", "evaluate", "named"),
    [
        (
            RegenerateConfig(max_new_tokens=41),
            EvaluateConfig(max_new_tokens=8),
            "regenerate.max_new_tokens .* got 101",
        ),
        (
            RegenerateConfig(max_new_tokens=8),
            EvaluateConfig(max_new_tokens=35),
            "evaluate.max_new_tokens .* got 101",
        ),
        (RegenerateConfig(enabled=False), EvaluateConfig(max_new_tokens=8), "data.max_tokens .* got 101"),
    ],
)
def test_lengths_that_do_not_fit_are_named(
    regenerate: RegenerateConfig, evaluate: EvaluateConfig, named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        check_lengths(DataConfig(max_prompt_tokens=60, max_tokens=101), ENGINE, regenerate, evaluate)


def test_an_unknown_key_is_refused() -> None:
    with pytest.raises(ValidationError, match="learning_rat\n.*Extra inputs are not permitted"):
        TrainConfig(learning_rat=1e-3)


SECRET = "s3://key:s3cr3t@bucket/x"


@pytest.mark.parametrize(
    ("block", "setting", "key"),
    [
        (TargetConfig, {"name": SECRET}, "target.name"),
        (TargetConfig, {"name": "org/model", "chat_template": SECRET}, "target.chat_template"),
        (DataConfig, {"sources": [{"path": "a.jsonl"}, {"path": SECRET}]}, "data.sources.1.path"),
        (DataConfig, {"excluded": [{"path": SECRET}]}, "data.excluded.0.path"),
        (TrainConfig, {"init_from": SECRET}, "train.init_from"),
        (FanOutConfig, {"server_urls": ["http://host", "http://s3cr3t@host"]}, "fanout.server_urls.1"),
        (PromoteConfig, {"place": SECRET}, "promote.place"),
    ],
)
def test_credentials_in_a_url_are_refused_and_never_shown(
    block: type[StageConfig], setting: Any, key: str
) -> None:
    with pytest.raises(
        ValueError, match=f"^{re.escape(key)}: a URL must carry no user, password or token"
    ) as by_keys:
        block.model_validate_json(json.dumps(setting))
    with pytest.raises(ValidationError, match="a URL must carry no user, password or token") as plain:
        block.model_validate(setting)
    assert "s3cr3t" not in f"{by_keys.value} {plain.value}"


def test_a_wrong_value_is_shown_without_the_secrets_of_urls() -> None:
    with pytest.raises(
        ValueError,
        match=r"target.name must be set; add it to the recipe; target.nam: no such setting.*got 's3://bucket/x'",
    ) as e:
        TargetConfig.model_validate_json(json.dumps({"nam": SECRET}))
    assert "s3cr3t" not in str(e.value)
    with pytest.raises(ValidationError) as e2:
        TargetConfig.model_validate({"nam": SECRET})
    assert "s3cr3t" not in str(e2.value)


def test_a_presigned_url_is_accepted() -> None:
    url = "https://host/rows.jsonl?X-Amz-Signature=x"
    assert SourceConfig(path=url).path == url


def test_settings_are_immutable() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        TrainConfig().epochs = 3


def test_every_process_needs_a_pack_in_each_step() -> None:
    with pytest.raises(ValidationError, match="processes must not exceed train.packs_per_step 2, got 3"):
        TrainConfig(processes=3, packs_per_step=2)


def test_settings_of_how_training_runs_do_not_decide_the_result() -> None:
    how = {
        "device": "cpu",
        "processes": 2,
        "checkpoint_every": 7,
        "disk_budget_bytes": 9,
        "init_from": "x",
        "init_revision": "y",
    }
    one = TrainConfig(dtype="float32", packs_per_step=2)
    other = TrainConfig(dtype="float32", packs_per_step=2, **how)
    assert one == one.settings_of_result() == other.settings_of_result() != other
    assert TrainConfig(seed=1).settings_of_result() == TrainConfig(seed=1)


def test_a_device_that_decides_the_dtype_is_in_keys_as_that_dtype() -> None:
    """auto is bfloat16 on a GPU and float32 on a CPU, which train different drafts."""
    kept = {device: TrainConfig(device=device).settings_of_result() for device in ("auto", "cpu", "cuda")}
    assert kept == {
        "auto": TrainConfig(),
        "cpu": TrainConfig(dtype="float32"),
        "cuda": TrainConfig(dtype="bfloat16"),
    }


def test_settings_of_the_result_are_valid_settings() -> None:
    given = TrainConfig(packs_per_step=4, processes=4)
    assert TrainConfig.model_validate_json(given.settings_of_result().model_dump_json()) == TrainConfig(
        packs_per_step=4
    )


def test_rows_that_keep_their_answers_must_fit_where_others_are_regenerated() -> None:
    for keeps, refused in ((False, True), (True, False)):
        data = DataConfig(
            sources=[SourceConfig(path="x", regenerate=not keeps)], max_prompt_tokens=60, max_tokens=101
        )
        outcome = (
            pytest.raises(ValueError, match="data.max_tokens must not exceed")
            if not refused
            else nullcontext()
        )
        with outcome:
            check_lengths(data, ENGINE, RegenerateConfig(max_new_tokens=40), EvaluateConfig(max_new_tokens=8))


def test_a_source_is_sampled_by_its_own_settings_if_it_has_some() -> None:
    own = {"tasks": SamplingConfig(temperature=0.0), "long": SamplingConfig(max_new_tokens=90, top_p=0.5)}
    cfg = RegenerateConfig(temperature=0.7, max_new_tokens=40, sources=own)
    assert cfg.sampling("tasks") == (0.0, 1.0, 40)
    assert cfg.sampling("long") == (0.7, 0.5, 90)
    assert cfg.sampling("others") == (0.7, 1.0, 40)
    for names in (["tasks"], ["long", "others"], []):
        kept = cfg.for_sources(names)
        assert kept.sources.keys() == cfg.sources.keys() & set(names)
        turned = cfg.model_copy(update={"sources": dict(reversed(own.items()))}).for_sources(names)
        assert turned.model_dump_json() == kept.model_dump_json()
        assert [kept.sampling(name) for name in names] == [cfg.sampling(name) for name in names]
    with pytest.raises(
        ValueError, match="regenerate.max_new_tokens must not exceed engine.max_model_len 100, got 150"
    ):
        check_lengths(
            DataConfig(max_prompt_tokens=60, max_tokens=100), ENGINE, cfg, EvaluateConfig(max_new_tokens=8)
        )
    check_sampled_sources(cfg, ["train", "tasks", "long"])
    with pytest.raises(
        ValueError, match=r"name sources of this run \(train, tasks\), got long; correct the names"
    ):
        check_sampled_sources(cfg, ["train", "tasks"])


@pytest.mark.parametrize(
    ("block", "text", "message"),
    [
        (TrainConfig, '{"epohcs": 3}', "train.epohcs: no such setting, correct or remove it, got 3"),
        (
            TrainConfig,
            '{"epochs": "x"}',
            "train.epochs: Input should be a valid integer, unable to parse .*, got 'x'",
        ),
        (TrainConfig, '{"epochs": "x", "seed": []}', "train.epochs: .*, got 'x'; train.seed: .*, got \\[\\]"),
        (
            TrainConfig,
            '{"processes": 3}',
            "train.processes must not exceed train.packs_per_step 1, got 3: .*; raise packs_per_step",
        ),
        (
            DataConfig,
            '{"sources": [{"path": "a", "wait": 1}]}',
            "data.sources.0.wait: no such setting, .*, got 1",
        ),
        (
            EngineConfig,
            '{"engine": "tensorrt"}',
            "engine.engine: Input should be 'vllm' or 'transformers', got 'tensorrt'",
        ),
        (EngineConfig, "[]", "engine: Input should be an object, got \\[\\]"),
    ],
)
def test_errors_in_a_block_of_a_recipe_take_one_line(
    block: type[StageConfig], text: str, message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{message}$") as error:
        block.model_validate_json(text)
    assert "\n" not in str(error.value)
    assert error.value.__cause__ is None


def test_long_values_are_cut_in_the_message() -> None:
    with pytest.raises(ValueError, match="…$") as error:
        EngineConfig.model_validate_json(f'{{"dtype": "{"x" * 1000}"}}')
    assert len(str(error.value)) < 300


def test_a_valid_block_is_read_as_pydantic_reads_it() -> None:
    assert TrainConfig.model_validate_json('{"epochs": 3}', strict=False, context={}) == TrainConfig(epochs=3)
