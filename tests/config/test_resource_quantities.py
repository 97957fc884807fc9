"""Quantities of pods as recipes write them: Kubernetes' strings, and plain numbers of cores."""

from typing import Any

import pytest
from pydantic import ValidationError

from eagle3.config.resources import ResourcesConfig

BYTES = ("mem", "ephemeral_storage", "shared_memory")


@pytest.mark.parametrize(
    ("number", "quantity"), [(4, "4"), (0.5, "0.5"), (4.0, "4"), (1.25, "1.25"), (0, "0"), (10**6, "1000000")]
)
def test_cores_may_be_a_number(number: float, quantity: str) -> None:
    assert ResourcesConfig(data={"cpu": number}) == ResourcesConfig(data={"cpu": quantity})
    assert ResourcesConfig.model_validate_json(f'{{"engine": {{"cpu": {number}}}}}').engine.cpu == quantity


@pytest.mark.parametrize("wrong", [True, False, -1, -0.5, 1e-7, float("nan"), float("inf"), [4], None])
def test_a_wrong_number_of_cores_is_refused(wrong: Any) -> None:
    with pytest.raises(ValidationError, match=r"engine\.cpu"):
        ResourcesConfig(engine={"cpu": wrong})


@pytest.mark.parametrize("name", BYTES)
@pytest.mark.parametrize("number", [8, 8.5, 8589934592])
def test_a_number_of_bytes_without_a_unit_is_refused(name: str, number: float) -> None:
    with pytest.raises(ValidationError, match=rf'must have a unit, got {number}; write "{number}Gi"'):
        ResourcesConfig(trainer={name: number})


@pytest.mark.parametrize("name", BYTES)
def test_true_and_false_are_no_quantities(name: str) -> None:
    with pytest.raises(ValidationError, match="valid string"):
        ResourcesConfig(trainer={name: True})


def test_quantities_survive_json() -> None:
    cfg = ResourcesConfig(engine={"cpu": 4, "mem": "64Gi"}, trainer={"cpu": 0.5, "shared_memory": "8Gi"})
    assert ResourcesConfig.model_validate_json(cfg.model_dump_json()) == cfg
