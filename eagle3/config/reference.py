"""Prints docs/settings.md, a table for each block of a recipe; `make docs` writes it."""

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from eagle3.config.base import StageConfig
from eagle3.config.run import RunSettings
from eagle3.config.training import HOW_ONLY, PromoteConfig

TITLE = """# Settings

A recipe is a YAML file with these blocks, and `prompts`, `heldout` and `run_name`. `promote` is an input of
`retrain_eagle3` alone. Settings marked † change no result: no stage runs again when they change. `make docs`
generates this page from `eagle3/config`.
"""
# Block -> settings that no cache key holds; * for all.
UNKEYED = {"data": ("workers",), "train": HOW_ONLY, "fanout": ("*",), "resources": ("*",)}
SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
NAMES = {str: "text", int: "integer", float: "number", bool: "true or false"}


def render_settings() -> str:
    """The page as Markdown."""
    models: dict[str, Any] = {name: field.annotation for name, field in RunSettings.model_fields.items()}
    parts = [TITLE]
    for block, model in (models | {"promote": PromoteConfig}).items():
        rows = [_row(block, key, field) for key, field in _settings(model)]
        head = f"## {block}\n\n{model.__doc__}\n\n| key | type | default | effect |\n|---|---|---|---|"
        parts.append("\n".join([head, *rows, ""]))
    return "\n".join(parts)


def is_unkeyed(block: str, name: str) -> bool:
    """Whether no cache key holds this setting."""
    return bool({name, "*"} & set(UNKEYED.get(block, ())))


def _settings(model: type[StageConfig], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Keys and fields of a model and of the models inside it; each inner model once."""
    shown: set[type[StageConfig]] = set()
    for name, field in model.model_fields.items():
        kind = get_origin(field.annotation)
        inner: Any = get_args(field.annotation)[-1] if kind in (list, dict) else field.annotation
        is_model = isinstance(inner, type) and issubclass(inner, StageConfig)
        if kind or not is_model:
            yield prefix + name, field
        if is_model and inner not in shown:
            shown.add(inner)
            step = "[]" if kind is list else ".<name>" if kind is dict else ""
            yield from _settings(inner, f"{prefix}{name}{step}.")


def _row(block: str, key: str, field: FieldInfo) -> str:
    mark = " †" if is_unkeyed(block, key) else ""
    limits = [
        f"{sign} {getattr(rule, name):g}"
        for rule in field.metadata
        for name, sign in SIGNS.items()
        if hasattr(rule, name)
    ]
    kind = ", ".join([_type_text(field.annotation), *limits])
    default = "required" if field.is_required() else f"`{json.dumps(field.default)}`"
    return f"| `{block}.{key}`{mark} | {kind} | {default} | {field.description} |"


def _type_text(kind: Any) -> str:
    """A type in plain words; a Literal as its choices."""
    arguments = get_args(kind)
    if get_origin(kind) is Literal:
        return ", ".join(f"`{json.dumps(choice)}`" for choice in arguments)
    if get_origin(kind) is list:
        return f"list of {_type_text(arguments[0])}"
    if get_origin(kind) is dict:
        return "mapping by name"
    if get_origin(kind) is Annotated:
        return _type_text(arguments[0])
    if type(None) in arguments:
        return f"{_type_text(arguments[0])} or null"
    return NAMES.get(kind, "mappings")


if __name__ == "__main__":
    print(render_settings(), end="")
