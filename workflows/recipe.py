"""The inputs that every run's workflow takes: a recipe's files, one settings block a stage, and the run's name."""

from collections.abc import Callable
from dataclasses import dataclass
from inspect import Parameter, Signature, signature
from typing import Any, get_type_hints

from flytekit import workflow
from flytekit.types.file import FlyteFile

from eagle3.config.data import DataConfig, VocabConfig
from eagle3.config.engine import (
    EngineConfig,
    EvaluateConfig,
    ExtractConfig,
    FanOutConfig,
    RegenerateConfig,
    TargetConfig,
)
from eagle3.config.resources import ResourcesConfig
from eagle3.config.run import RunSettings
from eagle3.config.training import ExportConfig, TrainConfig


@dataclass(frozen=True)
class Recipe:
    """A recipe's keys. While a workflow is compiled its values are Flyte's promises, not yet what the types say."""

    heldout: FlyteFile
    target: TargetConfig
    prompts: FlyteFile | None = None
    engine: EngineConfig = EngineConfig()
    data: DataConfig = DataConfig()
    regenerate: RegenerateConfig = RegenerateConfig()
    vocab: VocabConfig = VocabConfig()
    extract: ExtractConfig = ExtractConfig()
    train: TrainConfig = TrainConfig()
    export: ExportConfig = ExportConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    fanout: FanOutConfig = FanOutConfig()
    resources: ResourcesConfig = ResourcesConfig()
    run_name: str = "train_eagle3"

    def blocks(self) -> dict[str, Any]:
        """The settings of all stages, by their names."""
        return {name: getattr(self, name) for name in RunSettings.model_fields}


def recipe_workflow(body: Callable[..., Any]) -> Any:
    """Make a workflow of a function of a Recipe: its inputs are the recipe's keys, and the function's further parameters.

    All workflows take the same recipe file, so those that stop early take, and leave alone, the blocks of later stages too.

    Args:
        body: its first parameter is the Recipe.
    """
    more = list(signature(body).parameters.values())[1:]
    recipe_keys = list(signature(Recipe).parameters.values())

    def run(**inputs: Any) -> Any:
        if missing := [p.name for p in (*recipe_keys, *more) if not (_has_default(p) or p.name in inputs)]:
            raise ValueError(
                f"{body.__name__} needs {', '.join(missing)}: add to the recipe, or give --{missing[0]}"
            )
        extra = {p.name: inputs.pop(p.name) for p in more}
        return body(Recipe(**inputs), **extra)

    run.__name__ = run.__qualname__ = body.__name__
    run.__module__, run.__doc__ = body.__module__, body.__doc__
    own = get_type_hints(body)
    hints = get_type_hints(Recipe) | {name: own[name] for name in ("return", *(p.name for p in more))}
    run.__annotations__ = hints
    # Inputs without a default come first.
    keys = sorted(
        (p.replace(kind=Parameter.POSITIONAL_OR_KEYWORD) for p in (*recipe_keys, *more)), key=_has_default
    )
    run.__signature__ = Signature(keys, return_annotation=hints["return"])  # type: ignore[attr-defined]
    return workflow(run)


def _has_default(parameter: Parameter) -> bool:
    return parameter.default is not Parameter.empty
