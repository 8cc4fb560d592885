"""Leases: which island works on which ticket, and when all come to rest for a validation or a checkpoint.

A pure state machine: the same events in the same order give the same state, so that a log of them is all that must be
kept. Where tickets are divided (synchronous) every island gets its share of each; else each ticket goes to one island,
and to another one if that is lost, and islands may come and go. No ticket beyond the next stop is leased before all
before it are done.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from verbund.errors import RunFailed


@dataclass(frozen=True)
class Stops:
    """The steps at which all rest.

    Args:
        total: the last one; None: there is none.
        every: a stop after every so many steps, for each of these numbers.
    """

    total: int | None
    every: tuple[int, ...]

    def after(self, step: int) -> int | None:
        """The next stop beyond a step."""
        found = [(step // every + 1) * every for every in self.every]
        return min([*found, *([self.total] if self.total is not None else [])], default=None)


@dataclass
class Island:
    """What one island was given.

    Args:
        generation: of its processes.
        given: its tickets in the order in which its workers do them; of those that all have done none is kept.
        first: how many were given before those.
        done: by worker, how many of its tickets are done.
        clock: where tickets are divided, the next that it is given.
        leaves: it gets no more tickets.
        again: of its tickets those that were given before to processes that are lost, which may have pushed them.
    """

    generation: int = 0
    given: list[int] = field(default_factory=list)
    first: int = 0
    done: list[int] = field(default_factory=list)
    clock: int = 0
    leaves: bool = False
    again: list[int] = field(default_factory=list)


class Leases:
    """The state.

    Args:
        islands: how many there are at the beginning.
        workers: of each.
        divided: whether tickets are divided among all islands.
        begin: the step that training begins with.
        stops: where all rest.
    """

    def __init__(self, islands: int, workers: int, divided: bool, begin: int, stops: Stops) -> None:
        self.divided, self._stops, self._workers = divided, stops, workers
        self.islands = [Island(done=[0] * workers, clock=begin) for _ in range(islands)]
        self.stop: int | None = stops.after(begin - 1) if stops.total == begin else stops.after(begin)
        """The next stop."""
        self.rested = begin
        """The last stop at which all that was due is done."""
        self.reason: str | None = None
        """Why training ends at the next stop, as far as it is known."""
        self.ended: str | None = None
        self._next = begin
        self._again: list[int] = []

    # -- events --------------------------------------------------------------------------------------------------

    def enter(self, island: int, generation: int) -> None:
        """New processes are an island's: what the former ones had is given anew. Where tickets are not divided the
        island may be one that was not there."""
        while len(self.islands) <= island:
            self.islands.append(Island(done=[0] * self._workers))
        own = self.islands[island]
        if generation <= own.generation:
            return
        left = own.given[min(own.done) - own.first :]
        again: list[int] = []
        if self.divided:
            again = sorted({ticket for ticket in own.again if ticket >= own.clock} | set(left))
            own.clock = min([own.clock, *left])
        else:
            for ticket in left:
                heapq.heappush(self._again, ticket)
        self.islands[island] = Island(generation, [], 0, [0] * self._workers, own.clock, own.leaves, again)

    def release(self, island: int) -> None:
        """An island gets no more tickets; what it has it does. Where tickets are divided none can go."""
        self.islands[island].leaves = True

    def admit(self, island: int) -> None:
        """An island that was to leave, or has left, may come again."""
        if island < len(self.islands):
            self.islands[island].leaves = False

    def lease(self, island: int, number: int) -> bool:
        """An island wants its ticket number `number` (of those since it entered); whether there is one."""
        own = self.islands[island]
        if number < own.first + len(own.given):
            return True
        if (ticket := self._available(own)) is None:
            return False
        if self.divided:
            own.clock = ticket + 1
            self._next = max(self._next, own.clock)
        elif self._again:
            own.again.append(heapq.heappop(self._again))
        else:
            self._next += 1
        own.given.append(ticket)
        return True

    def done(self, island: int, worker: int, count: int) -> None:
        """A worker has done all but the last of its tickets up to number `count`; pushes of it are acknowledged."""
        own = self.islands[island]
        if count > own.first + len(own.given):
            raise RunFailed(f"island {island} says to have done more than it was given")
        own.done[worker] = max(own.done[worker], count)
        through = min(own.done) - own.first
        if through > 0:
            done = set(own.given[:through])
            own.again = [ticket for ticket in own.again if ticket not in done]
            del own.given[:through]
            own.first += through

    def end_soon(self, reason: str) -> None:
        """Training ends as soon as what has been leased is done."""
        if self.reason is None and self.ended is None:
            self.reason = reason
            self.stop = max(self._next, self.rested)

    def settle(self, step: int, reason: str | None) -> None:
        """What was due at a stop is done; training ends there if there is a reason."""
        if self.stop != step or self.low < step:
            return
        reason = reason or self.reason
        if reason is None and self._stops.total is not None and step >= self._stops.total:
            reason = "steps"
        self.rested = step
        if reason is not None:
            self.ended = reason
        else:
            self.stop = self._stops.after(step)

    # -- what there is -------------------------------------------------------------------------------------------

    def ticket(self, island: int, number: int) -> int:
        """An island's ticket of that number, which must be leased and not done by all."""
        own = self.islands[island]
        return own.given[number - own.first]

    def gone(self, island: int) -> bool:
        """Whether an island was to leave, and has done all that it had."""
        return self.islands[island].leaves and not self.islands[island].given

    @property
    def low(self) -> int:
        """All tickets below are done."""
        left = [min(own.given) for own in self.islands if own.given]  # who does a lost one's goes back
        if self.divided:
            return min([*left, *(own.clock for own in self.islands)])
        return min([*left, *self._again, self._next])

    @property
    def resting(self) -> bool:
        """Whether everything before the next stop is done, and nothing is leased."""
        return self.stop is not None and self.ended is None and self.low >= self.stop

    def missing(self) -> str:
        """Who has something that others wait for, in words."""
        held = [f"island {n} (ticket {own.given[0]})" for n, own in enumerate(self.islands) if own.given]
        return ", ".join(held) or "nobody"

    def record(self) -> dict[str, Any]:
        """The state as JSON values."""
        return {
            "islands": [asdict(own) for own in self.islands],
            "stop": self.stop,
            "rested": self.rested,
            "reason": self.reason,
            "ended": self.ended,
            "next": self._next,
            "again": list(self._again),
        }

    def load(self, record: dict[str, Any]) -> None:
        """Goes on from what `record` gave."""
        self.islands = [Island(**own) for own in record["islands"]]
        self.stop, self.rested = record["stop"], int(record["rested"])
        self.reason, self.ended = record["reason"], record["ended"]
        self._next, self._again = int(record["next"]), list(record["again"])

    def _available(self, own: Island) -> int | None:
        if self.ended is not None or own.leaves:
            return None
        ticket = own.clock if self.divided else self._again[0] if self._again else self._next
        return None if self.stop is not None and ticket >= self.stop else ticket


def stops(total: int | None, every: Sequence[int | str], epoch: int) -> Stops:
    """The stops of a job that validates and saves every so many steps, every `epoch`, or at the `end`."""
    found = {epoch if number == "epoch" else int(number) for number in every if number != "end"}
    return Stops(total, tuple(sorted(found)))
