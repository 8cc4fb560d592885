"""The staleness of updates, measured exactly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from verbund.exchange.parameter_server.push import Outcome


class Staleness:
    """How many steps the parameters were ahead of those that a gradient was computed with, of each update."""

    def __init__(self) -> None:
        self._updates: Counter[int] = Counter()
        self._late = 0
        self._known = 0
        self._skipped = 0

    def add(self, outcomes: Sequence[Outcome], behind: int | None = None) -> None:
        """Counts a push.

        Args:
            outcomes: what became of its parts; the largest staleness of its blocks is that of the update.
            behind: of a share of a ticket its staleness: the ticket less the oldest version that it was computed with.
        """
        if behind is not None and not all(outcome.state in ("known", "late") for outcome in outcomes):
            self._updates[behind] += 1
        elif behind is None:
            found = [outcome.staleness for outcome in outcomes if outcome.staleness is not None]
            if found:
                self._updates[max(found)] += 1
        if any(outcome.state == "late" for outcome in outcomes):
            self._late += 1
        if outcomes and all(outcome.state == "known" for outcome in outcomes):
            self._known += 1

    def skip(self) -> None:
        """Counts a share that is not computed, as its step has been taken."""
        self._skipped += 1

    def totals(self) -> dict[str, Any]:
        """For the journal: `staleness` is [value, updates] in order."""
        return {
            "staleness": [[value, count] for value, count in sorted(self._updates.items())],
            "late": self._late,
            "known": self._known,
            "skipped": self._skipped,
        }
