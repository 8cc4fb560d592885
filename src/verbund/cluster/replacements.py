"""Replacements: which processes of a run may be replaced when they are lost, and how often."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from verbund.cluster.process import ProcessSpec
from verbund.errors import ClusterLost


@dataclass
class Budget:
    """Losses that a run survives within a window of time, so that what always fails ends with its first cause.

    Args:
        limit: losses.
        window: seconds.
    """

    limit: int
    window: float
    _times: deque[float] = field(default_factory=deque)

    @property
    def spent(self) -> bool:
        """Whether there were as many within the window as are allowed."""
        while self._times and time.monotonic() - self._times[0] > self.window:
            self._times.popleft()
        return len(self._times) >= self.limit

    def take(self) -> bool:
        """Whether one more loss is survived; it counts then."""
        if self.spent:
            return False
        self._times.append(time.monotonic())
        return True

    def explain(self, error: ClusterLost) -> None:
        """Says of a loss that ends a run how many others it had survived."""
        if self.limit and self.spent:
            times = f"{self.limit} loss{'es' * (self.limit > 1)}"
            error.what += f"; {times} within {self.window:g} s had been survived before"


@dataclass
class Replacements:
    """Replaces lost processes, within a budget.

    Args:
        units: processes that can only go on together, e.g. the workers of an island; those in none are not replaced.
        budget: see there.
        tell: is told of each replacement: the new specs, and why.
    """

    units: list[list[ProcessSpec]]
    budget: Budget
    tell: Callable[[list[ProcessSpec], str], None] = lambda *_: None

    def add(self, unit: list[ProcessSpec]) -> None:
        """There is one more unit, or one of its name again."""
        names = {(spec.role, spec.rank) for spec in unit}
        self.units = [known for known in self.units if not names & {(one.role, one.rank) for one in known}]
        self.units.append(unit)

    def of(self, spec: ProcessSpec, why: str, charged: bool = True) -> list[ProcessSpec] | None:
        """The processes to start in place of the unit of a lost one; None if there is no more to be replaced.

        Args:
            spec: the lost one's.
            why: in words.
            charged: whether it counts among the losses that are survived.
        """
        unit = next((unit for unit in self.units if any(_same(one, spec) for one in unit)), None)
        if unit is None or (charged and not self.budget.take()):
            return None
        fresh = [replace(one, life=spec.life + 1) for one in unit]
        self.tell(fresh, why)
        return fresh


def _same(one: ProcessSpec, other: ProcessSpec) -> bool:
    return (one.role, one.rank) == (other.role, other.rank)
