"""What a target's config says: how far its positions reach, which layers a draft may see."""

import pytest

from eagle3.targets.properties import aux_layer_ids, check_max_model_len


def test_lengths_within_the_targets_positions_pass() -> None:
    check_max_model_len(2048, {"max_position_embeddings": 2048})
    check_max_model_len(
        8192, {"max_position_embeddings": 2048, "rope_parameters": {"rope_type": "yarn", "factor": 4.0}}
    )


@pytest.mark.parametrize("rope", [{}, {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}])
def test_lengths_beyond_the_targets_positions_are_refused(rope: dict) -> None:
    with pytest.raises(ValueError, match="must not exceed the target's 2048 positions, got 2049"):
        check_max_model_len(2049, {"max_position_embeddings": 2048, **rope})


def test_default_aux_layers_are_low_middle_and_high() -> None:
    assert aux_layer_ids([], 30) == [2, 15, 27]
    assert aux_layer_ids([], 7) == [2, 3, 4]
    assert aux_layer_ids([], 3) == [1, 2]


def test_aux_layers_beyond_the_targets_depth_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must be in 0 … 4, the target's layers, got \[1, 5\]"):
        aux_layer_ids([1, 5], 4)
