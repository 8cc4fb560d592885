"""What requests to a server say, read out of their messages; who is wrong is named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from verbund.comm.wire import Message
from verbund.errors import InputError
from verbund.exchange.parameter_server.exposed import Inbox
from verbund.exchange.parameter_server.plan import Plan
from verbund.exchange.parameter_server.push import Push, tensor_of


def sender(fields: Mapping[str, Any]) -> str | None:
    """Who has sent a request, for an error."""
    client = fields.get("client")
    return f"island {client}" if type(client) is int else None


def least_of(fields: Mapping[str, Any]) -> int:
    """The version that a reader must see at least."""
    least = fields.get("least", 0)
    if type(least) is not int:
        raise InputError("`least` of a request is no version", where=sender(fields))
    return least


def block_of(value: Any, plan: Plan) -> int:
    """A block's number."""
    if type(value) is not int or not 0 <= value < len(plan.blocks):
        raise InputError(f"there is no block {value!r}")
    return value


def push_of(message: Message, plan: Plan, inboxes: Mapping[str, Inbox]) -> Push:
    """The push of a message, whose values may lie in its client's memory.

    Args:
        message: the request.
        plan: of the run.
        inboxes: the memory of clients on this host, by name.
    """
    places = message.fields.get("places")
    if places is None:
        return Push.of(message.fields, message.arrays, plan)
    inbox = inboxes.get(str(message.fields.get("outbox")))
    if inbox is None or not isinstance(places, list) or len(places) != len(message.fields["parts"]):
        raise InputError("a push speaks of memory that it has not shown")
    values: dict[str, Tensor] = {}
    for number, (place, part) in enumerate(zip(places, message.fields["parts"], strict=True)):
        if place is not None:
            block = plan.blocks[block_of(part[0], plan)]
            values[f"v{number}"] = inbox.view(place, block.count, getattr(torch, block.dtype))
    return Push.of(message.fields, message.arrays, plan, values)


def parts_of(message: Message, plan: Plan) -> list[tuple[int, Tensor | None]]:
    """What a pull asks for: blocks, and of tables their rows."""
    fields = message.fields
    given = fields.get("parts")
    if not isinstance(given, list) or not given:
        raise InputError("a pull has no list of parts", where=sender(fields))
    parts: list[tuple[int, Tensor | None]] = []
    for number, item in enumerate(given):
        if not (isinstance(item, list) and len(item) == 2 and type(item[0]) is int):
            raise InputError(f"part {number} of a pull is not block, rows", where=sender(fields))
        if not 0 <= item[0] < len(plan.blocks):
            raise InputError(f"there is no block {item[0]}", where=sender(fields))
        rows = message.arrays.get(f"r{number}")
        if not (item[1] is not None) == (rows is not None) == (plan.blocks[item[0]].kind == "rows"):
            what = f"of a table rows are pulled, and of other blocks none, which block {item[0]} does not fit"
            raise InputError(what, where=sender(fields))
        parts.append((item[0], None if rows is None else torch.from_numpy(rows)))
    return parts


def beginning_of(message: Message, plan: Plan) -> tuple[int, Tensor | None, int, dict[str, Tensor] | None]:
    """What a block begins with: its number, values, version and the optimiser's state; see `Holdings.create`."""
    fields, arrays = message.fields, dict(message.arrays)
    block = block_of(fields.get("block"), plan)
    values = arrays.pop("values", None)
    named = fields.get("optimizer") or []
    if len(named) != len(arrays):
        raise InputError("a beginning has other optimiser states than it speaks of", where=sender(fields))
    state = {str(name): tensor_of(arrays[f"o{n}"], str(kind)) for n, (name, kind) in enumerate(named)}
    first = None if values is None else tensor_of(values, plan.blocks[block].dtype)
    return block, first, int(fields.get("version", 0)), state or None
