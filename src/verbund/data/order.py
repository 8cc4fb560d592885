"""The order of samples: a pure function of seed, size and ticket.

It knows no ranks and no workers, keeps no shuffled list, and seeks to any ticket in O(1).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from verbund.data.hashing import key
from verbund.data.permutation import Permutation

Positions = NDArray[np.int64]

_CHUNK = 4096
"""Places in the order that are computed at once: numpy's cost per call would dominate a small batch."""


class Order:
    """Which positions of the data set each global batch has.

    Every epoch permutes the data set's blocks, then the samples inside each window of `window` consecutive permuted
    blocks, so that a large store is read in runs. With `block` = 1 the blocks' permutation is a full shuffle already.

    Args:
        size: samples of the data set, at least 1.
        global_batch: samples of one ticket; the last ticket of an epoch may have fewer.
        seed: of the job; every epoch is permuted differently.
        block: samples that lie together in the store; from its manifest.
        window: blocks that are shuffled together.
    """

    def __init__(self, size: int, global_batch: int, seed: int, block: int = 1, window: int = 1024) -> None:
        if min(size, global_batch, block, window) < 1:
            raise ValueError("size, global_batch, block and window must be at least 1")
        self.samples = size
        self.global_batch = global_batch
        self.seed = seed
        self.block = min(block, size)
        self.window = window
        self.tickets_per_epoch = -(-size // global_batch)
        self._epoch: _Epoch | None = None

    def epoch(self, ticket: int) -> int:
        """The epoch that a ticket belongs to, from 0."""
        return ticket // self.tickets_per_epoch

    def size(self, ticket: int) -> int:
        """The number of samples of one ticket."""
        start = ticket % self.tickets_per_epoch * self.global_batch
        return min(self.global_batch, self.samples - start)

    def positions(self, ticket: int) -> Positions:
        """The samples of one ticket: int64, shape [size(ticket)], each in [0, samples).

        Raises:
            ValueError: on a negative ticket.
        """
        if ticket < 0:
            raise ValueError(f"ticket {ticket}")
        number = self.epoch(ticket)
        epoch = self._epoch
        if epoch is None or epoch.number != number:
            epoch = self._epoch = _Epoch(self, number)
        start = ticket % self.tickets_per_epoch * self.global_batch
        return epoch.places(start, min(start + self.global_batch, self.samples))


class _Epoch:
    """One epoch's permutation; what it remembers only saves time."""

    def __init__(self, order: Order, number: int) -> None:
        self.number = number
        self._size, self._block, self._window = order.samples, order.block, order.window
        self._seed = key(order.seed, number)
        blocks = -(-order.samples // order.block)
        self._blocks = Permutation(blocks, key(self._seed, 0))
        # The last block may be short by `_short` samples. All windows after the one it fell into start that much
        # earlier than they would if every block were full.
        self._short = blocks * order.block - order.samples
        self._short_slot = int(self._blocks.inverse(np.array(blocks - 1))) if self._short else blocks
        self._chunk: tuple[int, Positions] = (-1, np.empty(0, np.int64))

    def places(self, start: int, stop: int) -> Positions:
        parts = []
        while start < stop:
            number = start // _CHUNK
            first = number * _CHUNK
            known, chunk = self._chunk
            if known != number:
                chunk = self._compute(np.arange(first, min(first + _CHUNK, self._size)))
                self._chunk = (number, chunk)
            end = min(stop, first + _CHUNK)
            parts.append(chunk[start - first : end - first])
            start = end
        return np.concatenate(parts)

    def _compute(self, places: Positions) -> Positions:
        if self._block == 1:
            return self._blocks(places)
        span = self._window * self._block
        short_window = self._short_slot // self._window
        after = places >= (short_window + 1) * span - self._short
        windows = np.where(after, (places + self._short) // span, places // span)
        result = np.empty_like(places)
        for window in range(int(windows[0]), int(windows[-1]) + 1):
            here = slice(*np.searchsorted(windows, [window, window + 1]).tolist())
            result[here] = self._in_window(window, places[here])
        return result

    def _in_window(self, window: int, places: Positions) -> Positions:
        span = self._window * self._block
        short_window = self._short_slot // self._window
        start = window * span - (self._short if window > short_window else 0)
        stop = min(start + span - (self._short if window == short_window else 0), self._size)
        offsets = Permutation(stop - start, key(self._seed, 1, window))(places - start)
        if window == short_window:
            end = (self._short_slot % self._window + 1) * self._block - self._short
            offsets = offsets + np.where(offsets >= end, self._short, 0)
        slots = window * self._window + offsets // self._block
        return self._blocks(slots) * self._block + offsets % self._block
