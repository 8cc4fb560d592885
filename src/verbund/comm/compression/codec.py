"""What every codec is: values to bytes of a known number, and back."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from functools import lru_cache

import torch
from torch import Tensor

SLICE = 1 << 16
"""Values that are encoded at once: their scratch stays in a core's second-level cache."""
ALIGN = 16
"""Bytes; every part of a message begins at a multiple of it, so that it can be seen as any dtype."""


class Codec(ABC):
    """Turns values into a message and back. Keeps nothing from call to call.

    How long a message is depends on the number of values alone. What is not finite does not become finite.
    """

    unit: int = 1
    """A share of the values that is encoded for itself should be a multiple of this."""
    sliced: bool = True
    """Whether values are encoded slice by slice, rather than as one."""
    again: bool = True
    """Whether a sum of decoded messages can be encoded as well as each of them."""

    @abstractmethod
    def bytes_of(self, count: int) -> int:
        """Bytes of the message of `count` values, a multiple of `ALIGN`."""

    @abstractmethod
    def encode(self, values: Tensor, message: Tensor, key: int = 0) -> None:
        """Writes the message.

        Args:
            values: floating point, shape [count].
            message: uint8, shape [bytes_of(count)].
            key: of what is drawn, if anything is.
        """

    @abstractmethod
    def decode(self, message: Tensor, values: Tensor) -> None:
        """Overwrites `values` with what the message says."""

    def readable(self, message: Tensor, count: int) -> bool:
        """Whether a message of the right length, of whatever bytes, can be decoded."""
        return True

    def finite(self, message: Tensor, count: int) -> bool:
        """Whether all `count` values that were encoded were finite."""
        decoded = torch.empty(count, device=message.device)
        self.decode(message, decoded)
        return math.isfinite(float(torch.linalg.vector_norm(decoded)))

    def add(self, message: Tensor, values: Tensor, sign: float = 1.0) -> None:
        """Adds what the message says to `values`, or takes it away."""
        decoded = torch.empty_like(values)
        self.decode(message, decoded)
        values.add_(decoded, alpha=sign)

    def slices(self, count: int) -> list[tuple[slice, slice]]:
        """The parts of `count` values that are encoded for themselves, and where their messages lie."""
        return _slices(self, count)

    def size(self, count: int) -> int:
        """Bytes of all messages of `count` values."""
        parts = self.slices(count)
        return int(parts[-1][1].stop) if parts else 0


@lru_cache(maxsize=4096)
def _slices(codec: Codec, count: int) -> list[tuple[slice, slice]]:
    step = SLICE if codec.sliced else max(count, 1)
    found, at = [], 0
    for low in range(0, count, step):
        high = min(low + step, count)
        end = at + codec.bytes_of(high - low)
        found.append((slice(low, high), slice(at, end)))
        at = end
    return found


def aligned(size: int) -> int:
    """The next multiple of `ALIGN`."""
    return -(-size // ALIGN) * ALIGN
