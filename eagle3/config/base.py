"""What every settings model is: frozen, without unknown keys, and its faults are told by the keys of a recipe."""

from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from eagle3.uris import check_uri, redact_text

# Of a wrong value, characters.
MAX_SHOWN = 100

# A path or URL in a recipe, without credentials.
Uri = Annotated[str, AfterValidator(check_uri)]


class StageConfig(BaseModel):
    """Base of all stage settings: immutable, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    @classmethod
    def model_validate_json(cls, *args: Any, **kwargs: Any) -> Self:
        """As pydantic's, but what is wrong in a recipe is said by its keys: `pyflyte run` reads blocks by this, and ends with it.

        Raises:
            ValueError: each fault with its key, what must hold and what came.
        """
        try:
            return super().model_validate_json(*args, **kwargs)
        except ValidationError as e:
            block = cls.__name__.removesuffix("Config").lower()
            raise ValueError("; ".join(_fault(block, error) for error in e.errors())) from None


def _fault(block: str, error: Any) -> str:
    """One error of pydantic in a line. Our own validators say themselves what came, those of whole blocks the keys too."""
    key = ".".join((block, *map(str, error["loc"])))
    if error["type"] == "value_error":
        return f"{key}: {error['ctx']['error']}" if error["loc"] else str(error["ctx"]["error"])
    must = "no such setting, correct or remove it" if error["type"] == "extra_forbidden" else error["msg"]
    came = redact_text(repr(error["input"]))
    return f"{key}: {must}, got {came if len(came) <= MAX_SHOWN else came[:MAX_SHOWN] + '…'}"
