"""Quorum: which islands that train alone take part from one border to the next.

A border is a point at which they need each other: an exchange, a validation, a save, the end. All members come to the
same borders in the same order, and each of their workers asks here before it goes on. Who is lost is no member any more
at once; who comes late is left out after `grace` seconds, if enough others are there. What members were doing together
is then broken off, and they gather: an era begins, with those who are there and those who want to come back. As one
authority decides, there are no two opinions on who has taken part.

Minimum quorum and grace are those of Decoupled DiLoCo (Douillard et al., 2026), its weights those of DiLoCo here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from verbund.cluster.membership import Era
from verbund.errors import ClusterLost

GATHER, JOIN = "gather", "join"
"""What workers ask that are ready for another era; and those who want to be members again."""
EXCHANGE = "exchange"
"""What they do at the border after which one that was asked to end can go without a loss."""
ON, LAST, AGAIN, OUT = "on", "last", "again", "out"
"""Answers: all are there; so they are, and gather next, as one goes; something has changed: gather; this island is no
member any more."""
_IN_VAIN = 5
"""Times in a row that members meet anew at one border though nobody has come or gone."""

Reply = Callable[[str, Era, list[int]], None]
"""Answers a worker: what, the era that holds, and which members have what was trained."""


@dataclass(frozen=True)
class Asked:
    """What a worker asks at a border.

    Args:
        what: `gather`, `join`, or what it does there with the others.
        step: how many are done.
        reply: is called once.
        ok: whether what it did with the others was done.
        holds: whether it has what was trained.
        joins: gathering: whether others may come back here.
        combines: gathering: whether an exchange follows, which needs the quorum.
    """

    what: str
    step: int
    reply: Reply
    ok: bool = True
    holds: bool = True
    joins: bool = False
    combines: bool = False


class Quorum:
    """The supervisor's record of the islands. Knows no clock and no message: it is told of both.

    Args:
        islands: how many there are.
        size: workers of each.
        least: islands that an exchange needs.
        grace: seconds that others wait for a late one.
        deadline: seconds that they wait where they are too few.
        tell: is told of what happens, in words.
        announce: is told of each era, whose members are islands, and whether what is under way is to be broken off.
    """

    def __init__(
        self,
        islands: int,
        size: int,
        least: int,
        grace: float,
        deadline: float,
        tell: Callable[[str], None] = lambda _: None,
        announce: Callable[[Era, bool], None] = lambda *_: None,
    ) -> None:
        self.least, self.grace, self._size, self._deadline = least, grace, size, deadline
        self._tell, self.announce = tell, announce
        self.era = Era(0, tuple(range(islands)))
        self.closing = False
        """Nobody comes back any more."""
        self._met: set[int] = set()
        self._world = islands * size
        self._asked: dict[int, Asked] = {}
        self._waits: set[int] = set()
        self._since: float | None = None
        self._broken = False
        self._in_vain = 0
        self._leaving: set[int] = set()
        """Islands of which a worker was asked to end."""

    # -- who there is ---------------------------------------------------------------------------------------------

    @property
    def begun(self) -> bool:
        """Whether all have met at the beginning: before that one that is lost ends the attempt."""
        return len(self._met) == self._world

    def ranks(self) -> list[int]:
        """The workers of all members, by island."""
        return [rank for island in self.era.members for rank in self._workers(island)]

    def of(self, island: int, rank: int) -> bool:
        """Whether a worker is one of an island."""
        return rank // self._size == island

    def is_member(self, rank: int) -> bool:
        return rank // self._size in self.era.members

    def wants_back(self, rank: int) -> bool:
        """Whether a worker waits to become a member again."""
        return rank in self._asked and self._asked[rank].what == JOIN

    def met(self, rank: int) -> None:
        """A worker has met its peers at the beginning."""
        self._met.add(rank)

    def lost(self, rank: int) -> bool:
        """A worker is gone, and its island with it. Whether the others go on."""
        if not self.begun:
            return False
        island = rank // self._size
        self._leaving.discard(island)
        if island in self.era.members:
            self._leave_out([island])
        for one in self._workers(island):
            self._asked.pop(one, None)
            self._waits.discard(one)
        return bool(self.era.members)

    def leave(self, rank: int) -> bool:
        """A worker was asked by its machine to end: its island goes after the next exchange, which has what it has
        learnt. Whether it can wait for that; else it is as good as lost."""
        island = rank // self._size
        staying = set(self.era.members) - self._leaving - {island}
        if not self.begun or island not in self.era.members or len(staying) < self.least:
            return False
        self._leaving.add(island)
        return True

    def departed(self) -> list[int]:
        """Islands that were to go and have nothing left to do, since it was asked last."""
        gone = [i for i in self._leaving if i not in self.era.members and self._all_want_back(i)]
        for island in gone:
            self._leaving.discard(island)
            for rank in self._workers(island):
                del self._asked[rank]
        return gone

    # -- what workers ask -------------------------------------------------------------------------------------------

    def waits(self, rank: int) -> None:
        """A worker has come to a border, and waits for what it does there with the others."""
        if self.is_member(rank):
            self._waits.add(rank)

    def ask(self, rank: int, asked: Asked) -> None:
        """A worker asks; it is answered by `turn`, or at once if it is no member."""
        if asked.what != JOIN and not self.is_member(rank):
            asked.reply(OUT, self.era, [])
            return
        self._asked[rank] = asked

    def turn(self, now: float, stalled: Callable[[int], bool]) -> None:
        """Answers those that can be answered; to be called again and again.

        Args:
            now: seconds on a clock that never goes back.
            stalled: whether a worker seems to stand still; is asked only of late ones.

        Raises:
            ClusterLost: if too few are there, and nobody can come or has come.
        """
        members = self.era.members
        if not any(self._all(island, waiting=True) for island in members):
            self._since = None
            return
        self._since = now if self._since is None else self._since
        waited = now - self._since
        missing = [island for island in members if not self._all(island)]
        if missing and waited >= self.grace:
            late = [i for i in missing if not self._all(i, waiting=True)]
            late = late or [i for i in missing if any(map(stalled, self._workers(i)))]
            if late and len(members) - len(late) >= self.least:
                names = _names(late)
                self._tell(f"{names} did not come within {waited:.1f} s: the others go on without {_them(late)}")
                self._leave_out(late)
                missing = [island for island in missing if island not in late]
        if not missing:
            self._decide(waited)

    # -- decisions --------------------------------------------------------------------------------------------------

    def _decide(self, waited: float) -> None:
        """All members have asked."""
        asked = [self._asked[rank] for rank in self.ranks()]
        if all(one.what == GATHER for one in asked):
            self._gather(asked, waited)
            return
        alike = len({(one.what, one.step) for one in asked}) == 1
        if alike and not self._broken and all(one.ok for one in asked):
            going = [i for i in self.era.members if i in self._leaving] if asked[0].what == EXCHANGE else []
            self._answer(LAST if going else ON, self.ranks())
            self._in_vain = 0
            if going:
                staying = tuple(island for island in self.era.members if island not in going)
                self.era, self._broken = Era(self.era.number + 1, staying), True
            return
        self._answer(AGAIN, [rank for rank in self.ranks() if self._asked[rank].what != GATHER])
        self._broken = True

    def _gather(self, asked: list[Asked], waited: float) -> None:
        may_join = not self.closing and all(one.joins for one in asked)
        joining = self._joining() if may_join else []
        members = tuple(sorted([*self.era.members, *joining]))
        if any(one.combines for one in asked) and len(members) < self.least:
            few = f"{_names(self.era.members)} {'are' if len(members) > 1 else 'is'} left, and an exchange needs "
            few += f"{self.least} islands (`strategy.exchange.quorum`)"
            if not may_join:
                raise ClusterLost(few)
            if waited >= self._deadline:
                raise ClusterLost(f"{few}; nobody has come within {waited:.0f} s")
            return  # others are on their way
        holders = [i for i in self.era.members if all(self._asked[rank].holds for rank in self._workers(i))]
        if not holders:
            raise ClusterLost("nobody has what has been trained")
        changed = self._broken or members != self.era.members or len(holders) < len(members)
        if changed or not all(one.ok for one in asked):
            came = members != self.era.members
            self._in_vain = 0 if came else self._in_vain + 1
            if self._in_vain > _IN_VAIN:
                raise ClusterLost(f"the islands could not meet {_IN_VAIN} times in a row")
            self.era = Era(self.era.number + 1, members)
            self._broken = False
            if joining:
                self._tell(f"{_names(joining)} take{'s' * (len(joining) == 1)} part again")
            self.announce(self.era, False)
        self._answer(ON, self.ranks(), holders)

    def _joining(self) -> list[int]:
        """Islands that want to come back, all of whose workers have said so."""
        asking = {rank // self._size for rank, one in self._asked.items() if one.what == JOIN}
        return sorted(i for i in asking if i not in self._leaving and self._all_want_back(i))

    def _all_want_back(self, island: int) -> bool:
        return all(map(self.wants_back, self._workers(island)))

    def _leave_out(self, islands: list[int]) -> None:
        members = tuple(island for island in self.era.members if island not in islands)
        self.era, self._broken, self._in_vain = Era(self.era.number + 1, members), True, 0
        for rank in (rank for island in islands for rank in self._workers(island)):
            self._waits.discard(rank)
            if (asked := self._asked.pop(rank, None)) is not None:
                asked.reply(OUT, self.era, [])
        self.announce(self.era, True)

    def _answer(self, what: str, ranks: list[int], holders: list[int] | None = None) -> None:
        for rank in ranks:
            if (asked := self._asked.pop(rank, None)) is not None:
                asked.reply(what, self.era, holders or [])
        self._waits.clear()
        self._since = None

    def _all(self, island: int, waiting: bool = False) -> bool:
        """Whether all workers of an island have asked, or wait."""
        return all(rank in self._asked or (waiting and rank in self._waits) for rank in self._workers(island))

    def _workers(self, island: int) -> range:
        return range(island * self._size, (island + 1) * self._size)


def _names(islands: list[int] | tuple[int, ...]) -> str:
    return f"island{'s' * (len(islands) > 1)} {', '.join(map(str, islands))}"


def _them(islands: list[int]) -> str:
    return "them" if len(islands) > 1 else "it"
