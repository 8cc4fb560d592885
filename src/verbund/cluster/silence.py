"""How long a process may give no sign of life before it counts as lost: longer where signs come late for all.

A fixed limit takes a starved process for a dead one. Failure detectors that adapt weigh a silence by the pauses seen
before (Hayashibara et al., "The φ accrual failure detector", SRDS 2004). φ assumes how pauses are distributed; those of
a machine with too much to do have no such form, so here the longest of the last ones counts, as often as a run of bad
luck may multiply it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

_KEPT = 20
_TIMES = 4.0
"""A silence is suspicious that is so many times as long as the longest pause of late."""
_MOST = 4.0
"""No process is waited for longer than so many times `cluster.lost_after`."""


class Pauses:
    """Seconds between the last signs of life of one process."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._kept: deque[float] = deque(maxlen=_KEPT)

    def sign(self, at: float) -> None:
        """A sign of life came, at this time of the monotonic clock."""
        if self._last is not None:
            self._kept.append(at - self._last)
        self._last = at

    def discount(self, seconds: float) -> None:
        """Who listens was away for so long: what came meanwhile is no later for that."""
        if self._last is not None:
            self._last += seconds

    @property
    def longest(self) -> float:
        return max(self._kept, default=0.0)


def allowed(lost_after: float, neighbours: Iterable[Pauses]) -> float:
    """Seconds of silence after which a process counts as lost: `lost_after`, or more if signs of life come late on its
    host.

    Args:
        lost_after: the job's limit.
        neighbours: the pauses of the processes of its host, its own among them.
    """
    longest = max((pauses.longest for pauses in neighbours), default=0.0)
    return min(max(lost_after, _TIMES * longest), _MOST * lost_after)
