"""Records: what changes a server's holdings, as it travels to replicas and lies in the log.

The same records in the same order make the same holdings.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from verbund.comm.wire import Message
from verbund.errors import InputError
from verbund.exchange.parameter_server.clipping import Clipping
from verbund.exchange.parameter_server.holdings import Holdings, Image
from verbund.exchange.parameter_server.plan import Plan
from verbund.exchange.parameter_server.push import Outcome, Push, tensor_of

Record: TypeAlias = Push | Clipping | Image


def blocks_of(record: Record) -> list[int]:
    """The blocks that a record is about."""
    match record:
        case Push():
            return [part.block for part in record.parts]
        case Clipping():
            return list(record.blocks)
        case Image():
            return [record.block]


def of_blocks(record: Record, blocks: Container[int]) -> Record | None:
    """What a record says about these blocks; None if nothing."""
    kept = sum(block in blocks for block in blocks_of(record))
    if kept == len(blocks_of(record)):
        return record
    return record.of_blocks(blocks) if kept and not isinstance(record, Image) else None


def apply(holdings: Holdings, record: Record) -> list[Outcome]:
    """Does what a record says."""
    match record:
        case Push():
            return holdings.apply(record)
        case Clipping():
            return holdings.clip(record)
        case Image():
            holdings.put(record)
            return []


def encode(record: Record) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """A record's kind, fields and arrays."""
    match record:
        case Push():
            return "push", record.fields(), record.arrays()
        case Clipping():
            return "clip", record.fields(), {}
        case Image():
            dtypes = [[name, str(tensor.dtype).removeprefix("torch.")] for name, tensor in record.tensors.items()]
            arrays = {f"t{number}": tensor for number, tensor in enumerate(record.tensors.values())}
            return "image", {"block": record.block, "state": record.fields, "tensors": dtypes}, arrays


def decode(message: Message, plan: Plan, own: bool = False) -> Record:
    """The record that `encode` gave.

    Args:
        message: with its kind, fields and arrays.
        plan: says of which dtype values are.
        own: whether tensors get memory of their own.

    Raises:
        InputError: if it is none.
    """
    fields, arrays = message.fields, message.arrays
    if message.kind == "push":
        return Push.of(fields, arrays, plan)
    if message.kind == "clip":
        return Clipping.of(fields, plan)
    try:
        if message.kind == "image":
            tensors = {
                name: tensor_of(arrays[f"t{number}"], dtype) for number, (name, dtype) in enumerate(fields["tensors"])
            }
            if own:
                tensors = {name: tensor.clone() for name, tensor in tensors.items()}
            return Image(_block(fields["block"], plan), dict(fields["state"]), tensors)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"a record of kind `{message.kind}` is damaged: {error}") from None
    raise InputError(f"`{message.kind}` is no kind of record")


def _block(value: Any, plan: Plan) -> int:
    if type(value) is not int or not 0 <= value < len(plan.blocks):
        raise ValueError(f"there is no block {value!r}")
    return value


def outcomes_of(fields: Mapping[str, Any]) -> list[Outcome]:
    """The outcomes that `outcome_fields` gave."""
    return [Outcome(state, int(version), staleness) for state, version, staleness in fields["outcomes"]]


def outcome_fields(outcomes: Sequence[Outcome]) -> list[list[Any]]:
    """Outcomes as JSON values."""
    return [[outcome.state, outcome.version, outcome.staleness] for outcome in outcomes]
