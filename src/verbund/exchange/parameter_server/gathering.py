"""Gathering what islands keep between steps for a checkpoint, which one island leads while all rest.

That one asks; the coordinator hands the wish on to every worker of the others when they next want a ticket, and has the
answer once all of them have written what they keep. It remembers nothing of this over its own death: whoever asked
asks again, and what was written is written once more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verbund.exchange.parameter_server.leases import Island


class Gathering:
    """One checkpoint's.

    Args:
        step: of the checkpoint.
        leader: the island that asks.
        islands: all that are there with it: their generations by number.
        workers: of each island.
    """

    def __init__(self, step: int, leader: int, islands: Mapping[int, int], workers: int) -> None:
        self.step, self.leader, self.islands = step, leader, dict(islands)
        self._workers = workers
        self._records: dict[tuple[int, int], dict[str, Any]] = {}

    def is_of(self, step: int, leader: int, islands: Mapping[int, int]) -> bool:
        """Whether it is for this checkpoint, and nobody has come or gone since."""
        return (self.step, self.leader, self.islands) == (step, leader, dict(islands))

    def place(self, island: int) -> dict[str, int]:
        """Where among all that is kept an island's part lies."""
        return {"step": self.step, "place": sorted(self.islands).index(island), "of": len(self.islands)}

    def wanted(self, island: int, worker: int) -> dict[str, int] | None:
        """What a worker is to write, unless it has, or leads."""
        if island == self.leader or island not in self.islands or (island, worker) in self._records:
            return None
        return self.place(island)

    def take(self, island: int, worker: int, step: int, record: dict[str, Any]) -> None:
        """A worker has written its part; of another checkpoint than this one nothing is wanted."""
        if step == self.step and island in self.islands:
            self._records[island, worker] = record

    @property
    def records(self) -> list[dict[str, Any]] | None:
        """What all have written; None before that."""
        if len(self._records) < self._workers * (len(self.islands) - 1):
            return None
        return [self._records[key] for key in sorted(self._records)]


def there(islands: Sequence[Island]) -> dict[int, int]:
    """The islands that keep something: those that have come and are not to go, with their generations."""
    return {number: own.generation for number, own in enumerate(islands) if own.generation and not own.leaves}
