"""Base of all settings models: frozen, no unknown keys, errors that name the keys of a recipe."""

from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from eagle3.uris import check_uri, redact_text

# Characters of a wrong value in a message.
MAX_SHOWN = 100

# A path or URL in a recipe, without credentials.
Uri = Annotated[str, AfterValidator(check_uri)]


class StageConfig(BaseModel):
    """Settings of one stage: immutable, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    @classmethod
    def model_validate_json(cls, *args: Any, **kwargs: Any) -> Self:
        """Validate as pydantic does; the ValueError names recipe keys, for `pyflyte run` to print."""
        try:
            return super().model_validate_json(*args, **kwargs)
        except ValidationError as e:
            raise ValueError("; ".join(_fault(cls.__name__, error) for error in e.errors())) from None


def _fault(model: str, error: Any) -> str:
    """Format one pydantic error; messages of our own validators already name key and value."""
    block = [model.removesuffix("Config").lower()] if model.endswith("Config") else []
    path = [*block, *map(str, error["loc"])]
    key = ".".join(path) or "recipe"
    if error["type"] == "value_error":
        text = str(error["ctx"]["error"])
        return text if len(path) <= 1 else f"{key}: {text}"
    if error["type"] == "missing":
        return f"{key} must be set; add it to the recipe"
    if error["type"] == "string_type" and isinstance(error["input"], int | float):
        return f"{key} must be text, YAML reads {error['input']!r}; put it in quotes in the recipe"
    must = "no such setting, correct or remove it" if error["type"] == "extra_forbidden" else error["msg"]
    came = redact_text(repr(error["input"]))
    return f"{key}: {must}, got {came if len(came) <= MAX_SHOWN else came[:MAX_SHOWN] + '…'}"
