"""A push: what an island has learnt from one ticket, for the blocks of one server."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from verbund.comm.wire import Array
from verbund.errors import InputError
from verbund.exchange.parameter_server.coded import codec_of, decode
from verbund.exchange.parameter_server.plan import Plan


@dataclass(frozen=True)
class Part:
    """The gradient of one block.

    Args:
        block: its number.
        base: the version of the block that the gradient was computed with.
        values: flat; of a table the rows' gradients one after the other; None: the loss did not depend on the block.
        rows: of a table, which rows of the whole table, int64, ascending, each once.
        message: what travels in place of the values, of which these were made (`coded`); None: they themselves.
    """

    block: int
    base: int
    values: Tensor | None
    rows: Tensor | None = None
    message: Tensor | None = None


@dataclass(frozen=True)
class Push:
    """A contribution. Per block, values · scale are undivided sums, and weight is what all shares' sum is divided by.

    Args:
        client: the island.
        generation: of the island: a newer one fences the older.
        ticket: the number of the global batch.
        share: which part of the ticket this is; 0 where tickets are not divided.
        scale: see above.
        weight: see above.
        rate: factor on the optimiser's learning rates (the schedule).
        low: all tickets below are done everywhere: what is remembered of them may be forgotten.
        parts: by block.
    """

    client: int
    generation: int
    ticket: int
    share: int
    scale: float
    weight: float
    rate: float
    low: int
    parts: Sequence[Part]

    def fields(self) -> dict[str, Any]:
        """All but the tensors, as JSON values; see `arrays`."""
        parts = [
            [part.block, part.base, part.values is not None, None if part.rows is None else len(part.rows)]
            for part in self.parts
        ]
        return {
            "client": self.client,
            "generation": self.generation,
            "ticket": self.ticket,
            "share": self.share,
            "scale": self.scale,
            "weight": self.weight,
            "rate": self.rate,
            "low": self.low,
            "parts": parts,
        }

    def arrays(self) -> dict[str, Tensor]:
        """The tensors: of the i-th part its values as `v<i>`, or their message as `c<i>`, and its rows as `r<i>` where
        it is of a table."""
        found: dict[str, Tensor] = {}
        for number, part in enumerate(self.parts):
            if part.message is not None:
                found[f"c{number}"] = part.message
            elif part.values is not None:
                found[f"v{number}"] = part.values
            if part.rows is not None:
                found[f"r{number}"] = part.rows
        return found

    def of_blocks(self, blocks: Container[int]) -> Push:
        """The same contribution, to these blocks alone."""
        return replace(self, parts=[part for part in self.parts if part.block in blocks])

    @staticmethod
    def of(
        fields: Mapping[str, Any], arrays: Mapping[str, Array], plan: Plan, known: Mapping[str, Tensor] | None = None
    ) -> Push:
        """The push that `fields` and `arrays` gave, whose tensors lie in the memory of the arrays; `known` are those
        that did not travel.

        Raises:
            InputError: if it is none. Whether its parts fit their blocks is another question.
        """
        given = fields.get("parts")
        if not isinstance(given, list):
            raise InputError("a push has no list of parts")
        parts = []
        for number, item in enumerate(given):
            if not (isinstance(item, list) and len(item) == 4 and all(type(n) is int and n >= 0 for n in item[:2])):
                raise InputError(f"part {number} of a push is not block, version, whether it has values, rows")
            if item[0] >= len(plan.blocks):
                raise InputError(f"there is no block {item[0]}; there are {len(plan.blocks)}")
            values = rows = message = None
            if item[3] is not None:
                rows = tensor_of(_array(arrays, f"r{number}"))
            if item[2] and f"c{number}" in arrays:
                message = tensor_of(arrays[f"c{number}"])
                values = _said(message, plan, item[0], rows)
            elif item[2] and (known is None or (values := known.get(f"v{number}")) is None):
                values = tensor_of(_array(arrays, f"v{number}"), plan.blocks[item[0]].dtype)
            parts.append(Part(item[0], item[1], values, rows, message))
        if len({part.block for part in parts}) < len(parts):
            raise InputError("a push names a block twice")
        client, generation, ticket, share, low = (
            _whole(fields, name) for name in ("client", "generation", "ticket", "share", "low")
        )
        scale, weight, rate = (_real(fields, name) for name in ("scale", "weight", "rate"))
        return Push(client, generation, ticket, share, scale, weight, rate, low, parts)


def tensor_of(array: Array, dtype: str = "") -> Tensor:
    """A received array as a tensor; of bfloat16, which arrives as float32, if that is its `dtype`."""
    tensor = torch.from_numpy(array)
    return tensor.bfloat16() if dtype == "bfloat16" and tensor.dtype == torch.float32 else tensor


def _said(message: Tensor, plan: Plan, number: int, rows: Tensor | None) -> Tensor:
    """The values of a block that a message says."""
    block = plan.blocks[number]
    count = block.count if rows is None else len(rows) * block.width
    codec = codec_of(plan, number, count)
    if codec is None:
        method = plan.compression.name
        raise InputError(f"{count} values of block {number} (`{block.name}`) do not travel as `{method}`")
    return decode(codec, message, count, getattr(torch, block.dtype))


def _array(arrays: Mapping[str, Array], name: str) -> Array:
    if name not in arrays:
        raise InputError(f"a push lacks the array `{name}` that it speaks of")
    return arrays[name]


def _whole(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    if type(value) is not int or value < 0:
        raise InputError(f"`{name}` of a push is a whole number from 0, not {value!r}")
    return value


def _real(fields: Mapping[str, Any], name: str) -> float:
    value = fields.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise InputError(f"`{name}` of a push is a finite number, not {value!r}")
    return float(value)


@dataclass(frozen=True)
class Outcome:
    """What became of one part.

    Args:
        state: `applied`: the optimiser has stepped (or a sum was added to); `waiting`: kept until the other shares of
            the ticket are there; `known`: it had come before; `late`: its ticket went on without it.
        version: of the block, now.
        staleness: of an asynchronous step, or of a share: how many versions the block was ahead of the gradient's base
            when its step was taken; None where it is not known yet or was not counted again.
    """

    state: Literal["applied", "waiting", "known", "late"]
    version: int
    staleness: int | None
