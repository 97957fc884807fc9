"""Settings that cannot work together are refused before anything runs."""

import pytest
from pydantic import ValidationError

from eagle3.config import DataConfig, EngineConfig, EvaluateConfig, RegenerateConfig, TrainConfig, check_lengths

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
        (RegenerateConfig(max_new_tokens=41), EvaluateConfig(max_new_tokens=8), "regenerate.max_new_tokens .* got 101"),
        (RegenerateConfig(max_new_tokens=8), EvaluateConfig(max_new_tokens=35), "evaluate.max_new_tokens .* got 101"),
        (RegenerateConfig(enabled=False), EvaluateConfig(max_new_tokens=8), "data.max_tokens .* got 101"),
    ],
)
def test_lengths_that_do_not_fit_are_named(regenerate: RegenerateConfig, evaluate: EvaluateConfig, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        check_lengths(DataConfig(max_prompt_tokens=60, max_tokens=101), ENGINE, regenerate, evaluate)


def test_an_unknown_key_is_refused() -> None:
    with pytest.raises(ValidationError, match="learning_rat\n.*Extra inputs are not permitted"):
        TrainConfig(learning_rat=1e-3)


def test_settings_are_immutable() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        TrainConfig().epochs = 3


def test_every_process_needs_a_pack_in_each_step() -> None:
    with pytest.raises(ValidationError, match="processes must not exceed train.packs_per_step 2, got 3"):
        TrainConfig(processes=3, packs_per_step=2)


def test_where_and_how_do_not_decide_the_result() -> None:
    one, other = TrainConfig(), TrainConfig(device="cpu", packs_per_step=1, processes=1, checkpoint_every=7, disk_budget_bytes=9)
    assert one.settings_of_result() == other.settings_of_result()
    assert one.settings_of_result() != TrainConfig(seed=1).settings_of_result()
