"""How long a worker is busy with its own part of a step: reading and computing, not blocked by others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from verbund.data.loader import Batch
from verbund.mesh.traffic import Traffic

TOLD = 2
"""Numbers that a worker tells the others of each step: its own seconds, and how many of them it waited for data."""


class OwnSeconds:
    """Measures this worker's own seconds, from one all-reduce of gradients to the next.

    What workers with the same samples (axes `tensor` and `pipeline`) wait for each other counts as their own: together
    they are as fast as that.

    Args:
        speaks: whether this one tells the others, for all who have the same samples. In a pipeline that is the first
            stage, which ends last.
    """

    def __init__(self, speaks: bool) -> None:
        self._speaks = speaks
        self._begun = self._between = self._blocked = self._data = 0
        self._traffic: Traffic | None = None
        self._before = 0

    def begin(self, traffic: Traffic | None) -> None:
        """A step's gradients begin; `traffic` has the exchanges with workers that have other samples."""
        self._begun = time.monotonic_ns()
        self._traffic = traffic
        self._before = traffic.blocked if traffic is not None else 0
        self._blocked = self._data = 0

    def end(self) -> tuple[float, ...]:
        """They are computed: what is to be told."""
        own = time.monotonic_ns() - self._begun - self._blocked + self._between
        if self._traffic is not None:
            own -= self._traffic.blocked - self._before
        self._between = 0
        return (max(own, 0) / 1e9, self._data / 1e9) if self._speaks else ()

    @contextmanager
    def between(self) -> Iterator[None]:
        """What is done in the block after a step's sums counts for the next one."""
        start, blocked = time.monotonic_ns(), self._blocked
        try:
            yield
        finally:
            self._between += time.monotonic_ns() - start - (self._blocked - blocked)

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """The block waits for others."""
        start = time.monotonic_ns()
        try:
            yield
        finally:
            self._blocked += time.monotonic_ns() - start

    def blocking(self, call: Callable[[Tensor], Any]) -> Callable[[Tensor], None]:
        """The same call, as one that waits for others."""

        def timed(tensor: Tensor) -> None:
            with self.blocked():
                call(tensor)

        return timed

    def reading(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches; how long they take to come is data's."""
        while True:
            start = time.monotonic_ns()
            batch = next(batches, None)
            self._data += time.monotonic_ns() - start
            if batch is None:
                return
            yield batch
