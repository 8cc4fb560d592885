"""When a worker was blocked in the exchanges of one step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

_MOST = 4096


class Traffic:
    """The intervals (nanoseconds) in which this worker did nothing but exchange; taken once a step."""

    def __init__(self) -> None:
        self._intervals: list[tuple[int, int]] = []

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Takes note of how long the block lasts."""
        start = time.monotonic_ns()
        try:
            yield
        finally:
            if len(self._intervals) < _MOST:
                self._intervals.append((start, time.monotonic_ns()))

    def take(self) -> list[tuple[int, int]]:
        """The intervals since the last call."""
        taken, self._intervals = self._intervals, []
        return taken
