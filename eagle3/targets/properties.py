"""Properties of a target from its JSON files: aux layers, longest sequence, end-of-turn tokens."""

import json
from pathlib import Path
from typing import Any

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def aux_layer_ids(wanted: list[int], num_layers: int) -> list[int]:
    """Choose the aux layers: the wanted ones, or a low, a middle and a high one.

    Args:
        wanted: ids in vLLM's numbering, k for the residual stream after k decoder layers; empty means 2, n //
            2, n - 3, closer together below 7 layers.
        num_layers: decoder layers n of the target.

    Returns:
        Ascending ids without repetition, the order of the engine's states.

    Raises:
        ValueError: if an id is outside 0 … n.
    """
    if not wanted:
        spread = (
            (2, num_layers // 2, num_layers - 3) if num_layers >= 7 else (1, num_layers // 2, num_layers - 1)
        )
        return sorted({max(1, k) for k in spread})
    if min(wanted) < 0 or max(wanted) > num_layers:
        rule = f"extract.layer_ids must be in 0 … {num_layers}, the target's layers"
        raise ValueError(f"{rule}, got {wanted}; change the recipe")
    return sorted(set(wanted))


def check_max_model_len(max_model_len: int, config: dict[str, Any]) -> None:
    """Refuse an engine.max_model_len beyond the positions of the target: there its states are nonsense."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    limit = int(config.get("max_position_embeddings", max_model_len))
    if (rope.get("rope_type") or rope.get("type")) == "yarn":
        # gpt-oss gives the stretched length as max_position_embeddings, older configs the length before.
        limit = max(limit, int(rope.get("original_max_position_embeddings", limit) * rope.get("factor", 1)))
    if max_model_len > limit:
        rule = f"engine.max_model_len must not exceed the target's {limit} positions"
        raise ValueError(f"{rule}, got {max_model_len}; lower it")


def end_of_turn_ids(target_dir: str | Path) -> list[int]:
    """Token ids that end an answer, ascending, as generation_config.json and config.json name them."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = Path(target_dir) / name
        named = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
        found.update([named] if isinstance(named, int) else named or [])
    return sorted(found)
