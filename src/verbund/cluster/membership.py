"""Membership: which workers take part in a training whose workers come and go, era by era.

An era has a number and members. It rises whenever members change: at once if one is lost, so that the others go on
without it, and else at a border of steps that all members agree upon. Whoever takes a place starts, loads and builds by
itself while the others work, says that it is ready, and is a member from the next era on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from verbund.cluster.process import ProcessSpec
from verbund.cluster.replacements import Budget

_SETTLE_SECONDS = 1.0
"""How long new processes wait for the members to have met: forking would hold up their meeting."""
_PREEMPTED, _SURPLUS = "preempted", "surplus"

Tell = Callable[[str, str], None]
"""Is told of what happens, in words, and the process concerned; empty if it is none."""


@dataclass(frozen=True)
class Era:
    """A membership.

    Args:
        number: rises with every change.
        members: the ranks of those who take part, the longest-serving first unless each has a place of its own; a
            worker's place among them is its rank in the mesh of this era.
    """

    number: int
    members: tuple[int, ...]


@dataclass(frozen=True)
class Bounds:
    """How many workers there may be.

    Args:
        least: with fewer, members wait for those that are to come.
        most: that `scale` takes.
        fewer: whether it goes on with fewer than wanted, but `least`, where no more losses are replaced.
        placed: whether each holds something of its own, so that who comes must take the place of one that goes.
    """

    least: int
    most: int
    fewer: bool = False
    placed: bool = False


class Membership:
    """The supervisor's record of who takes part, and what follows from it.

    Args:
        specs: of the first members, by rank.
        budget: of losses; who leaves when asked costs nothing.
        bounds: see there.
        tell: see there.
        announce: is told of each new era.
    """

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        budget: Budget,
        bounds: Bounds,
        tell: Tell = lambda *_: None,
        announce: Callable[[Era], None] = lambda _: None,
    ) -> None:
        self._first, self.budget, self.bounds, self._tell, self._announce = specs[0], budget, bounds, tell, announce
        self.era = Era(0, tuple(spec.rank for spec in specs))
        self.wanted = len(specs)
        """How many workers there are to be."""
        self.closing = False
        """Nobody joins any more."""
        self._living = list(self.era.members)
        self._holders = set(self._living)
        self._joining: dict[int, bool] = {}
        self._leaving: dict[int, str] = {}
        self._lives = dict.fromkeys(self._living, 0)
        self._met: set[int] = set()
        self._since = time.monotonic()
        self._forced = False
        self._dismissed: list[int] = []

    # -- what happens to workers -----------------------------------------------------------------------------------

    def lost(self, rank: int, why: str, charged: bool = True) -> bool:
        """A worker is gone. Whether the training goes on without it, or with another in its place.

        Args:
            rank: the worker's.
            why: in words.
            charged: whether it counts among the losses that are survived.
        """
        self._holders.discard(rank)
        joined = self._joining.pop(rank, None) is not None
        if not joined and rank not in self._living:
            return True  # it was to go
        if rank in self._living:
            self._living.remove(rank)
            self._forced = True
        leaving = self._leaving.pop(rank, None)
        if not self._holders:
            return False
        if self.closing or leaving is not None or not charged or self.budget.take():
            replaced = not self.closing and leaving != _SURPLUS
            follows = "another process takes its place" if replaced else "the others go on"
            self._tell(f"{why}: {follows}", f"worker {rank}" if replaced else "")
            return True
        if not self.bounds.fewer or self.wanted - 1 < self.bounds.least:
            return False
        self.wanted -= 1
        self._tell(f"{why}, and no more losses are replaced: {self.wanted} workers go on", "")
        return True

    def ready(self, rank: int) -> None:
        """A worker that joins has all but what the members have trained."""
        if rank in self._joining:
            self._joining[rank] = True

    def met(self, rank: int, era: int) -> None:
        """A member has met the others of an era, and has what they have trained."""
        if rank in self._living:
            self._holders.add(rank)
            if era == self.era.number:
                self._met.add(rank)

    def leave(self, rank: int) -> bool:
        """A worker was asked by its machine to end: it goes at the next border, and another takes its place. Whether
        that is a member; one that only joins can end at once."""
        if rank not in self._living:
            return False
        if rank not in self._leaving:
            self._leaving[rank] = _PREEMPTED
            self._tell(f"worker {rank} was asked to end: another process takes its place", f"worker {rank}")
        return True

    def scale(self, workers: int) -> None:
        """From now on there are to be so many workers."""
        self._tell(f"{workers} worker{'s are' if workers != 1 else ' is'} asked for", "")
        self.wanted = workers
        for rank in [rank for rank, why in self._leaving.items() if why == _SURPLUS]:
            del self._leaving[rank]
        surplus = len(self._staying()) + len(self._joining) - workers
        dismissed = sorted(self._joining)[-surplus:] if surplus > 0 else []
        for rank in dismissed:
            del self._joining[rank]
        self._dismissed += dismissed
        surplus = len(self._staying()) - workers
        for rank in self._staying()[::-1][: max(surplus, 0)]:
            self._leaving[rank] = _SURPLUS

    def dismissed(self) -> list[int]:
        """The ranks of those that were joining and are not needed any more, since it was asked last."""
        ranks, self._dismissed = self._dismissed, []
        return ranks

    # -- what is to be done ------------------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """How many take part."""
        return len(self.era.members)

    def refusal(self, workers: int) -> str | None:
        """Why there cannot be so many workers; None if there can."""
        inside = self.bounds.least <= workers <= self.bounds.most
        return None if inside else f"it takes {self.bounds.least} to {self.bounds.most} workers"

    @property
    def settled(self) -> bool:
        """Whether all members have met in the newest era."""
        return not self._forced and self._met >= set(self.era.members)

    @property
    def complete(self) -> bool:
        """Whether there are as many as there are to be, and all have met."""
        return self.settled and not self._joining and not self._leaving and len(self._living) == self.wanted

    def is_member(self, rank: int) -> bool:
        return rank in self._living

    def holds(self, rank: int) -> bool:
        """Whether a worker has what has been trained."""
        return rank in self._holders

    def change(self) -> tuple[Era, set[int]] | None:
        """The next era, and who leaves with it, if members change now; all are to be told then."""
        ready = [] if self.closing else [rank for rank, is_ready in self._joining.items() if is_ready]
        staying = self._staying()
        if not self._forced and (self.closing or not self.settled):
            return None
        enough = len(staying) + len(ready) >= self.bounds.least and self._holders & set(staying)
        # Who is to leave stays as long as it is needed.
        members = self._in_places(staying if enough else self._living, ready)
        if not self._forced and members == self._living:
            return None
        if len(members) < self.bounds.least and not self.closing:
            return None
        for rank in ready:
            del self._joining[rank]
        gone = set(self._living) - set(members)
        for rank in gone:
            del self._leaving[rank]
        self._holders &= set(members)
        self._living, self._forced = members, False
        self._met, self._since = set(), time.monotonic()
        self.era = Era(self.era.number + 1, tuple(members))
        self._announce(self.era)
        return self.era, gone

    def _in_places(self, former: Sequence[int], new: Sequence[int]) -> list[int]:
        """The members in their order."""
        if not self.bounds.placed:
            return [*former, *new]
        coming = iter(new)
        members = [rank if rank in former else next(coming, None) for rank in self.era.members]
        return [rank for rank in members if rank is not None]

    def due(self) -> list[ProcessSpec]:
        """The processes to start now; they count as joining."""
        if self.closing:
            return []
        missing = self.wanted - len(self._staying()) - len(self._joining)
        waited = self._forced or self.settled or time.monotonic() - self._since > _SETTLE_SECONDS
        if missing <= 0 or not waited:
            return []
        taken = {*self._living, *self._joining}
        free = (rank for rank in range(self.wanted + len(taken)) if rank not in taken)
        specs = []
        for rank, _ in zip(free, range(missing), strict=False):
            life = self._lives[rank] = self._lives.get(rank, -1) + 1
            settings = {**self._first.settings, "joins": True}
            specs.append(replace(self._first, rank=rank, life=life, settings=settings))
            self._joining[rank] = False
        return specs

    def lives(self) -> dict[int, int]:
        """Of each member the number of those that had its rank before."""
        return {rank: self._lives[rank] for rank in self._living}

    def _staying(self) -> list[int]:
        return [rank for rank in self._living if rank not in self._leaving]
