"""Islands that come and go while a training goes on, where each takes whole batches and none waits for another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from verbund.cluster.membership import Bounds, Tell
from verbund.cluster.process import ProcessSpec


class Islands:
    """The supervisor's record of the islands that there are and are to be: always the first so many by number.

    Args:
        unit: the workers of the first island, which is always there.
        count: how many islands there are at the beginning.
        bounds: on the number of workers.
        tell: is told of changes in words.
        announce: is told, once all are as they are to be, of the ranks of the workers.
    """

    def __init__(
        self,
        unit: Sequence[ProcessSpec],
        count: int,
        bounds: Bounds,
        tell: Tell = lambda *_: None,
        announce: Callable[[list[int]], None] = lambda _: None,
    ) -> None:
        self._unit, self.bounds, self._tell, self._announce = list(unit), bounds, tell, announce
        self._there = set(range(count))
        self._working = set(range(count * len(unit)))
        self.count = count * len(unit)
        """Workers at the last time that all were as they were to be."""
        self.wanted = self.count

    def refusal(self, workers: int) -> str | None:
        """Why there cannot be so many workers; None if there can."""
        size = len(self._unit)
        if not self.bounds.least <= workers <= self.bounds.most:
            return f"it takes {self.bounds.least} to {self.bounds.most} workers"
        return f"each of its islands has {size} workers" if workers % size else None

    def scale(self, workers: int) -> None:
        """From now on there are to be so many workers."""
        self._tell(f"{workers} workers are asked for", "")
        self.wanted = workers

    @property
    def islands(self) -> int:
        """How many islands there are to be."""
        return self.wanted // len(self._unit)

    @property
    def complete(self) -> bool:
        """Whether all that are to be there work, and no others."""
        size = len(self._unit)
        return self._there == set(range(self.islands)) and self._working == set(range(self.islands * size))

    def ready(self, rank: int) -> None:
        """A worker begins to work."""
        if rank // len(self._unit) in self._there:
            self._working.add(rank)

    def ended(self, rank: int) -> None:
        """A worker has done all that its island had, and is gone."""
        self._working.discard(rank)
        island, size = rank // len(self._unit), len(self._unit)
        if not any(other in self._working for other in range(island * size, (island + 1) * size)):
            self._there.discard(island)

    def due(self) -> list[list[ProcessSpec]]:
        """By island the processes to start now."""
        missing = [island for island in range(self.islands) if island not in self._there]
        self._there |= set(missing)
        size = len(self._unit)
        return [[replace(spec, rank=island * size + spec.rank) for spec in self._unit] for island in missing]

    def settle(self) -> None:
        """Announces a change that is done."""
        if self.complete and self.count != self.wanted:
            self.count = self.wanted
            self._announce(list(range(self.count)))
