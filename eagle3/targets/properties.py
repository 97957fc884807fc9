"""Properties of a target from its JSON files: aux layers, positions, end-of-turn tokens."""

import json
from pathlib import Path
from typing import Any

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def aux_layer_ids(wanted: list[int], num_layers: int) -> list[int]:
    """The aux layers in ascending order, as in the engine's states.

    wanted: ids as in vLLM: k is the residual stream after k decoder layers. [] means 2, n // 2, n - 3 for n
    layers, and 1, n // 2, n - 1 below 7 layers.
    """
    if not wanted:
        low, high = (2, num_layers - 3) if num_layers >= 7 else (1, num_layers - 1)
        return sorted({max(1, k) for k in (low, num_layers // 2, high)})
    if min(wanted) < 0 or max(wanted) > num_layers:
        rule = f"extract.layer_ids must be in 0 … {num_layers}, the target's layers"
        raise ValueError(f"{rule}, got {wanted}; change the recipe")
    return sorted(set(wanted))


def check_max_model_len(max_model_len: int, config: dict[str, Any]) -> None:
    """Refuse an engine.max_model_len above the target's positions: its states after them are meaningless."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    limit = int(config.get("max_position_embeddings", max_model_len))
    if (rope.get("rope_type") or rope.get("type")) == "yarn":
        # max_position_embeddings is the length after stretching in gpt-oss, before it in older configs.
        limit = max(limit, int(rope.get("original_max_position_embeddings", limit) * rope.get("factor", 1)))
    if max_model_len > limit:
        rule = f"engine.max_model_len must not exceed the target's {limit} positions"
        raise ValueError(f"{rule}, got {max_model_len}; lower it")


def end_of_turn_ids(target_dir: str | Path) -> list[int]:
    """The eos_token_id values of generation_config.json and config.json, ascending."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = Path(target_dir) / name
        named = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
        found.update([named] if isinstance(named, int) else named or [])
    return sorted(found)
