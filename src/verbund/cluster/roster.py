"""The processes of a run as their supervisor has them: who there is, who is needed still, and what all are told."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from verbund.cluster.process import Exit, Process, ProcessSpec
from verbund.cluster.watched import Watched
from verbund.comm.wire import WireError


class Roster:
    """All that were started, those that have ended among them."""

    def __init__(self) -> None:
        self._all: dict[tuple[int, int], Watched] = {}
        self.finishing = False
        """Whether those that serve were told to end, as all others have."""

    def __iter__(self) -> Iterator[Watched]:
        return iter([*self._all.values()])

    def add(self, process: Process) -> Watched:
        """One more was started."""
        watched = self._all[process.key] = Watched(process, time.monotonic())
        return watched

    def of(self, ended: Exit) -> Watched | None:
        """Whose end this is."""
        return self._all.get((ended.host, ended.pid))

    @property
    def waiting(self) -> list[Watched]:
        """Those whose end is to come."""
        return [watched for watched in self if watched.exit is None]

    @property
    def living(self) -> list[Watched]:
        """Those that work, and are needed."""
        return [watched for watched in self.waiting if watched.result is None and self.matters(watched)]

    def matters(self, watched: Watched) -> bool:
        """Whether the run needs a process still: no other takes its place, and whom it works for are not done."""
        return not (watched.replaced or (self.finishing and watched.process.spec.serves))

    @property
    def any_done(self) -> bool:
        """Whether a worker has come to the end of the training."""
        done = [w for w in self if w.result is not None and not w.replaced]
        return any(not w.process.spec.serves for w in done)

    def lives_of(self, spec: ProcessSpec) -> int:
        """How many processes have had its name."""
        return sum(w.name == (spec.role, spec.rank) for w in self)

    def have_ended(self, fresh: Sequence[ProcessSpec]) -> bool:
        """Whether all those have ended whose places these are to take."""
        names = {(spec.role, spec.rank) for spec in fresh}
        return all(w.exit is not None for w in self if w.name in names)

    def placed(self, spec: ProcessSpec, coming: Sequence[ProcessSpec]) -> ProcessSpec:
        """Where it runs: with as many others on its host as the one before it, or where there are fewest of them.

        Args:
            spec: what is to be started.
            coming: those that are on their way.
        """
        alike = [w for w in self if w.process.spec.role == spec.role]
        former = next((w.process for w in reversed(alike) if w.name == (spec.role, spec.rank)), None)
        if former is not None:
            was = former.spec
            return replace(spec, host=former.host, place=was.place, neighbours=was.neighbours, residents=was.residents)
        hosts = [w.process.host for w in alike if not w.replaced]
        hosts += [other.host for other in coming if other.host is not None and other.role == spec.role]
        fewest = min(sorted(set(hosts)), key=hosts.count)
        residents = sum(w.process.host == fewest and not w.replaced for w in self)
        residents += sum(other.host == fewest for other in coming) + 1
        count = hosts.count(fewest)
        return replace(spec, host=fewest, place=count, neighbours=count + 1, residents=residents)

    def discount(self, late: float) -> None:
        """Takes a standstill of this process itself, of so many seconds, off the others' silence."""
        for watched in self:
            watched.heard += late
            watched.pauses.discount(late)
            watched.since += late
            if watched.over is not None:
                watched.over += late

    def all_ended(self) -> None:
        """No exits will come any more: all processes end with the cluster."""
        for watched in self:
            watched.exit = watched.exit or Exit(watched.process.pid, -9)

    def tell_all(self, kind: str, **fields: Any) -> None:
        """Sends a message to all processes that live."""
        for watched in self.waiting:
            tell(watched, kind, **fields)


def tell(watched: Watched, kind: str, **fields: Any) -> None:
    """Sends a message to a process."""
    try:
        watched.process.connection.send(kind, fields)
    except WireError:
        return  # its exit is on the way
