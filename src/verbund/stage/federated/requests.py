"""What a client says, checked field by field; whatever is wrong is an InputError that goes back to it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verbund.comm.wire import Message
from verbund.errors import InputError
from verbund.exchange.federated.content import PART_BYTES


def text(fields: Mapping[str, Any], key: str) -> str:
    """A text of a request; of bounded length."""
    value = fields.get(key)
    if not isinstance(value, str) or len(value) > 16_384:
        raise InputError(f"`{key}` of a request is no text, or too long")
    return value


def number(fields: Mapping[str, Any], key: str) -> int:
    """A whole number of a request, not below 0."""
    value = fields.get(key)
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise InputError(f"`{key}` of a request is no whole number")
    return value


def facts_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of an update besides its tensors, checked."""
    weight, steps = fields.get("weight"), number(fields, "local_steps")
    if not isinstance(weight, (int, float)) or isinstance(weight, bool) or not math.isfinite(weight) or weight <= 0:
        raise InputError("the weight of an update is no positive number")
    sums = fields.get("sums")
    if not isinstance(sums, dict) or len(sums) > 64 or not all(_pair(value) for value in sums.values()):
        raise InputError("the sums of an update are not pairs of finite numbers")
    facts: dict[str, Any] = {
        "base_version": number(fields, "version"),
        "weight": float(weight),
        "local_steps": steps,
        "bytes": number(fields, "bytes"),
        "seconds": float(fields.get("seconds") or 0.0),
        "sums": {str(name)[:80]: value for name, value in sums.items()},
    }
    if (state := fields.get("state")) is not None:
        facts["state"] = state_of(state)
    if (epsilon := fields.get("epsilon")) is not None:
        if type(epsilon) is not float or not 0.0 <= epsilon < math.inf:
            raise InputError("the ε of an update is no number")
        facts["epsilon"] = epsilon
    return facts


@dataclass(frozen=True)
class Answer:
    """A client's answer in the exchanges of secure aggregation.

    Args:
        round: in which.
        number: of the invitation.
        step: what it answers.
        sha256: of what is said.
        content: that; None if it was sent in parts before.
    """

    round: int
    number: int
    step: str
    sha256: str
    content: bytes | None


def answer_of(message: Message) -> Answer:
    """The one in a request.

    Raises:
        InputError: if there is none, or it is not what its name says.
    """
    fields, part, content = message.fields, message.arrays.get("message"), None
    digest = text(fields, "sha256")
    if part is not None:
        if part.dtype.name != "uint8" or part.ndim != 1 or part.size > PART_BYTES:
            raise InputError("a message of secure aggregation is bytes, and larger ones are sent in parts")
        content = part.tobytes()
        if hashlib.sha256(content).hexdigest() != digest:
            raise InputError("what came is not what its name says", where=digest[:64])
    return Answer(number(fields, "round"), number(fields, "number"), text(fields, "step"), digest, content)


def _pair(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(isinstance(part, (int, float)) and math.isfinite(part) for part in value)
    )


def state_of(state: Any) -> dict[str, Any]:
    """A client's sums of metrics: lists of numbers by name.

    Raises:
        InputError: if they are not.
    """

    def numbers(value: Any, depth: int = 0) -> bool:
        if isinstance(value, list):
            return depth < 3 and len(value) <= 1 << 20 and all(numbers(part, depth + 1) for part in value)
        return isinstance(value, (int, float)) and math.isfinite(value)

    if not isinstance(state, dict) or len(state) > 256 or not all(numbers(value, 0) for value in state.values()):
        raise InputError("what an evaluation gave is not lists of finite numbers")
    return {str(name)[:80]: value for name, value in state.items()}


def statistics_of(fields: Mapping[str, Any], asked: Mapping[str, int]) -> dict[str, Any]:
    """What a client tells of its columns.

    Args:
        fields: of the request.
        asked: the columns, with the bins of each.

    Raises:
        InputError: if it is not what was asked.
    """

    def finite(value: Any) -> bool:
        return type(value) in (int, float) and math.isfinite(value)

    answer = fields.get("answer")
    if not isinstance(answer, dict):
        raise InputError("what is told of columns is no answer")
    if "declined" in answer:
        return {"declined": str(answer["declined"])[:80]}
    columns, noise = answer.get("columns"), answer.get("noise")
    if not isinstance(columns, dict) or columns.keys() != asked.keys() or not (noise is None or finite(noise)):
        raise InputError("what is told of columns is not of those that were asked about")
    for name, told in columns.items():
        if told is None:
            continue
        if not isinstance(told, dict) or told.keys() != {"count", "sum", "squares", "bins"}:
            raise InputError(f"what is told of the column `{name}` is not its sums")
        bins = told["bins"]
        if not isinstance(bins, list) or len(bins) != asked[name] + 2:
            raise InputError(f"the histogram of the column `{name}` has not the bins that were asked")
        if not all(finite(told[key]) for key in ("count", "sum", "squares")):
            raise InputError(f"the sums of the column `{name}` are no finite numbers")
        if not all(many is None or finite(many) for many in bins):
            raise InputError(f"the histogram of the column `{name}` is no finite numbers")
    return {"columns": columns, "noise": noise}
