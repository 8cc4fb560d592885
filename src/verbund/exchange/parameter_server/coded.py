"""What of a push travels as the message of a codec, and what servers make of it."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from verbund.comm.compression import methods
from verbund.comm.compression.codec import Codec
from verbund.errors import InputError
from verbund.exchange.parameter_server.plan import Plan
from verbund.job import CASTS, Compression
from verbund.randomness.hash import combine


def codec_of(plan: Plan, block: int, count: int) -> Codec | None:
    """What so many values of a block travel as; None: as they are.

    That is of running statistics, of whole numbers, and of what a message would not make smaller. Rows of tables are
    cast alone: what else is left out would have to be kept, for as many rows as the table has.
    """
    method, found = plan.compression.name, plan.blocks[block]
    if method == "none" or found.kind == "sum" or (found.kind == "rows" and method not in CASTS):
        return None
    dtype: torch.dtype = getattr(torch, found.dtype)
    codec = _codec(plan.compression)
    if codec is None or not dtype.is_floating_point or codec.size(count) >= count * dtype.itemsize:
        return None
    return codec


def encode(codec: Codec, values: Tensor, key: int) -> Tensor:
    """The message of flat values: uint8, [codec.size(len(values))].

    Args:
        codec: what it is made by.
        values: floating point.
        key: of what is drawn, if anything is.
    """
    message = torch.zeros(codec.size(len(values)), dtype=torch.uint8)
    for number, (part, place) in enumerate(codec.slices(len(values))):
        codec.encode(values[part], message[place], combine(key, number))
    return message


def decode(codec: Codec, message: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """What a message says: `count` values, flat, the same bits for everybody who reads it.

    Raises:
        InputError: if it is no message of so many values.
    """
    size = codec.size(count)
    if message.dtype != torch.uint8 or message.shape != (size,):
        what = f"{str(message.dtype).removeprefix('torch.')} {list(message.shape)}"
        raise InputError(f"a message of {count} values has {size} bytes (uint8), and this one is {what}")
    values = torch.empty(count, dtype=dtype if dtype in (torch.float32, torch.float64) else torch.float32)
    for part, place in codec.slices(count):
        if not codec.readable(message[place], part.stop - part.start):
            raise InputError(f"a message names values beyond the {count} that it is of")
        codec.decode(message[place], values[part])
    return values.to(dtype)


@lru_cache(maxsize=64)
def _codec(settings: Compression) -> Codec | None:
    """One for all, as it remembers how it cuts values up."""
    return methods.codec(settings)
