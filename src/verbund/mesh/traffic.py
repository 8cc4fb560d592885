"""What the exchanges inside a step cost: those of the axes `tensor` and `shard`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from verbund.observe.events import Journal, index_among

_MOST = 4096


class Traffic:
    """The exchanges of one step: when each was begun, when this worker had nothing but it to wait for, and when it was
    over (nanoseconds); taken once a step.

    Args:
        ranks: the workers, by their numbers in the island.
        world: the workers of the island.
        number: tells the exchanges of one axis from another's.
    """

    def __init__(self, ranks: Sequence[int], world: int, number: int) -> None:
        self._ranks, self._world, self._number = ranks, world, number
        self._exchanges: list[tuple[int, int, int]] = []
        self.blocked = 0
        """Nanoseconds blocked so far."""

    @contextmanager
    def timed(self, begun: int | None = None) -> Iterator[None]:
        """Takes note of how long the block lasts; `begun` is when the exchange was, if that was before."""
        start = time.monotonic_ns()
        try:
            yield
        finally:
            end = time.monotonic_ns()
            self.blocked += end - start
            if len(self._exchanges) < _MOST:
                self._exchanges.append((start if begun is None else begun, start, end))

    def write(self, journal: Journal, step: int) -> None:
        """Hands what there was since the last call to the journal."""
        taken, self._exchanges = self._exchanges, []
        for count, (begun, blocked, done) in enumerate(taken):
            index = index_among(self._ranks, self._world, self._number * _MOST + count)
            journal.collective(step, index, begun, blocked, done)
