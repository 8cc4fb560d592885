"""Memory that the messages of one connection are received into, one after the other: its pages are there already."""

from __future__ import annotations

import numpy as np

from verbund.comm.wire.frames import Array

_ALIGN = 64
_EASED = 64  # messages after which memory that they did not need is given back


class Memory:
    """Holds the arrays of one message; they are valid until the next one begins."""

    def __init__(self) -> None:
        self._block: Array = np.empty(0, np.uint8)
        self._taken = 0
        self._most = 0
        self._messages = 0

    def begin(self) -> None:
        """Makes room for the next message; what the former one had is overwritten."""
        self._most = max(self._most, self._taken)
        self._messages += 1
        if self._taken > self._block.size or (self._messages >= _EASED and self._most < self._block.size // 2):
            self._block = np.empty(self._most, np.uint8)
        if self._messages >= _EASED:
            self._most = self._messages = 0
        self._taken = 0

    def take(self, size: int) -> Array:
        """So many bytes."""
        start = self._taken
        self._taken += -(-size // _ALIGN) * _ALIGN
        return self._block[start : start + size] if start + size <= self._block.size else np.empty(size, np.uint8)

    def leave(self) -> None:
        """Leaves this memory to whoever still has arrays of the last message; the next one gets another."""
        self._block = np.empty(0, np.uint8)
