"""What all sections of a job have in common."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator


def listed(value: Any) -> Any:
    """A list, also where a single text was given."""
    return [value] if isinstance(value, str) else value


Positive = Annotated[int, Field(gt=0)]
Names = Annotated[list[str], BeforeValidator(listed)]


class Section(BaseModel):
    """Base of all parts of a job: frozen, strict, no unknown keys."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)
    shorthand: ClassVar[str | None] = None
    """The key that a bare value in place of the section stands for."""

    @model_validator(mode="before")
    @classmethod
    def _expanded(cls, value: Any) -> Any:
        if cls.shorthand is not None and isinstance(value, (str, int, float)) and not isinstance(value, bool):
            return {cls.shorthand: value}
        return value
