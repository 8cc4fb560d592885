"""What a request says, field by field: of the right type and within bounds, or it is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from verbund.errors import InputError

_MOST = 1 << 53
LIVES = 1000
"""A process's generation is at most so much above the newest that was there: those between were lost at their start."""


def whole(fields: Mapping[str, Any], name: str, low: int = 0, high: int = _MOST) -> int:
    """A whole number from `low` to `high`.

    Raises:
        InputError: if it is none; so for the following.
    """
    value = fields.get(name)
    if type(value) is not int or not low <= value <= high:
        raise _wrong(name, f"a whole number from {low} to {high}", value)
    return value


def wholes(fields: Mapping[str, Any], name: str, below: int = _MOST) -> list[int]:
    """Whole numbers from 0, all below a limit."""
    value = fields.get(name)
    if not isinstance(value, list) or not all(type(number) is int and 0 <= number < below for number in value):
        raise _wrong(name, f"whole numbers below {below}", value)
    return value


def text(fields: Mapping[str, Any], name: str, longest: int) -> str:
    """A text of at most so many characters."""
    value = fields.get(name)
    if not isinstance(value, str) or len(value) > longest:
        raise _wrong(name, f"text of at most {longest} characters", value)
    return value


def flag(fields: Mapping[str, Any], name: str) -> bool:
    """True or false."""
    value = fields.get(name)
    if type(value) is not bool:
        raise _wrong(name, "true or false", value)
    return value


def table(fields: Mapping[str, Any], name: str, longest: int) -> dict[str, Any]:
    """A JSON object of at most so many characters."""
    value = fields.get(name)
    if not isinstance(value, dict) or len(json.dumps(value)) > longest:
        raise _wrong(name, f"an object of at most {longest} characters", value)
    return value


def _wrong(name: str, what: str, value: object) -> InputError:
    return InputError(f"`{name}` of a request is {what}, not {repr(value)[:60]}")
