"""The workflow input `recipe`: `--recipe FILE` reads a YAML file into it.

The field order of an attribute of a workflow input may change from run to run (flyteorg/flyte#6517). So
cached tasks take the whole recipe as an ignored input, and settings for their keys from resolve_inputs.
"""

from pathlib import Path
from typing import Annotated, Any

import yaml
from flytekit import FlyteContext, FlyteContextManager
from flytekit.core.type_engine import TypeEngine, TypeTransformer
from flytekit.extras.pydantic_transformer.transformer import PydanticTransformer
from flytekit.models.literals import Literal
from flytekit.models.types import LiteralType
from flytekit.types.file import FlyteFile
from pydantic import BeforeValidator, Field, ValidationInfo

from eagle3.config.run import RunSettings
from eagle3.uris import check_uri

# flytekit reads a recipe with yaml.safe_load and writes it as JSON, which has no dates: they stay text.
yaml.SafeLoader.add_constructor("tag:yaml.org,2002:timestamp", lambda _, node: node.value)


def _as_file(value: Any, info: ValidationInfo) -> Any:
    """Convert a path or URL of a recipe to the form that FlyteFile validates."""
    if isinstance(value, int | float):
        raise ValueError(
            f"{info.field_name} must be a path or URL, YAML reads {value!r}; put it in quotes in the recipe"
        )
    if not isinstance(value, str):
        return value
    try:
        check_uri(value)
    except ValueError as e:
        raise ValueError(f"{info.field_name}: {e}") from None
    if "://" not in value and not Path(value).is_file():
        raise ValueError(
            f"{info.field_name} must be the path or URL of a file, got {value}, which is no file; correct it"
        )
    return {"path": value}


class Recipe(RunSettings):
    """A run: its settings, its prompt files, its name."""

    prompts: Annotated[FlyteFile | None, BeforeValidator(_as_file)] = Field(
        default=None,
        description="path or URL of a file with prompts; needed unless data.sources names others",
    )
    heldout: Annotated[FlyteFile, BeforeValidator(_as_file)] = Field(
        description="path or URL of a file with held-out prompts, on which the draft is measured"
    )
    run_name: str = Field(default="train_eagle3", description="the reports are in runs/<run_name>")


class RecipeTransformer(PydanticTransformer):  # type: ignore[misc]
    """Uploads a recipe's files in remote runs; flytekit's transformer does not upload files in pydantic
    models."""

    def __init__(self) -> None:
        TypeTransformer.__init__(self, "Recipe", Recipe, enable_type_assertions=False)

    def to_literal(
        self, ctx: FlyteContext, python_val: Recipe, python_type: type[Recipe], expected: LiteralType
    ) -> Literal:
        with FlyteContextManager.with_context(ctx.new_builder()):
            return super().to_literal(ctx, python_val, python_type, expected)


TypeEngine.register(RecipeTransformer())
