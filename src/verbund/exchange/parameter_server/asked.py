"""What a request says, field by field: of the right type and within bounds, or it is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from verbund.checkpoint.manifest import DTYPES
from verbund.errors import InputError
from verbund.exchange.parameter_server.plan import CONSISTENCIES, KINDS, Plan

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


def plan_of(record: Any) -> Plan:
    """The plan that a worker has made.

    Raises:
        InputError: if it is none.
    """
    try:
        plan = Plan.of(record)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InputError(f"`plan` of a request is none: {type(error).__name__}: {error}") from None
    for block in plan.blocks:
        if not block.box.inside(block.shape) or block.dtype not in DTYPES or block.kind not in KINDS:
            what = f"{block.kind} {block.dtype} {block.box} of {list(block.shape)}"
            raise InputError(f"`plan` of a request has the block {what}")
    if plan.rule.consistency not in CONSISTENCIES:
        raise InputError(f"`plan` of a request has the rule {plan.rule.consistency!r}")
    if not plan.blocks:
        raise InputError("`plan` of a request has no blocks")
    return plan


def _wrong(name: str, what: str, value: object) -> InputError:
    return InputError(f"`{name}` of a request is {what}, not {repr(value)[:60]}")
