"""The processes of one host find each other, and map each other's memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from verbund.comm.shared_memory import identity
from verbund.comm.shared_memory.arena import Arena, Lives, Neighbour, NoRoom
from verbund.comm.shared_memory.channel import BYTES, Channel
from verbund.comm.shared_memory.identity import Unavailable
from verbund.comm.shared_memory.progress import Progress

Exchange = Callable[[dict[str, Any]], list[dict[str, Any]]]
"""Gives a record of plain values to all members of a group, and gets theirs, by rank."""


class Host:
    """This process among those of its host.

    Args:
        arena: this process's.
        number: this process's among all, on whichever host.
        hosts: which host each process is on.
        neighbours: those on this one, by their numbers.
        problem: why this process cannot use their memory, if so; the others hear of it with the first channels.
    """

    def __init__(
        self,
        arena: Arena,
        number: int,
        hosts: Sequence[str],
        neighbours: dict[int, Neighbour],
        problem: str | None = None,
    ) -> None:
        self.arena, self.number = arena, number
        self._hosts = hosts
        self._neighbours = neighbours
        self._problem = problem
        self.progress = Progress(1 + len(neighbours))
        self.moved = 0
        """Bytes of the values that this process has handed over to collectives."""

    @staticmethod
    def described() -> tuple[Arena | None, dict[str, Any]]:
        """This process's arena, and what the others are to know of it, plain values."""
        try:
            host, arena = identity.host(), Arena()
            return arena, {"problem": None, "host": host, **arena.record()}
        except Unavailable as error:
            return None, {"problem": str(error)}

    @staticmethod
    def met(number: int, arena: Arena | None, records: Sequence[dict[str, Any]]) -> tuple[Host | None, str | None]:
        """This process among those of its host, once all have told their records.

        Returns:
            The host, if any two processes share one; and why there is none, if that is not as it should be.
        """
        if note := _note(records):
            return None, note
        hosts = [record["host"] for record in records]
        if arena is None or len(set(hosts)) == len(hosts):
            return None, None
        neighbours: dict[int, Neighbour] = {}
        problem = None
        try:
            for other, record in enumerate(records):
                if other != number and record["host"] == hosts[number]:
                    neighbours[other] = Neighbour.of(record)
        except Unavailable as error:
            problem = str(error)
        return Host(arena, number, hosts, neighbours, problem), None

    def leave(self) -> None:
        """This process goes on with nothing that it has begun: who waits for it hears that it is gone."""
        self.arena.leave()
        self.progress.left = True

    def companions(self, members: Sequence[int]) -> list[list[int]]:
        """The members of a group, by their numbers, divided by hosts; in the order of their first ones."""
        found: dict[str, list[int]] = {}
        for member in members:
            found.setdefault(self._hosts[member], []).append(member)
        return list(found.values())

    def channels(self, members: Sequence[int], count: int, exchange: Exchange) -> tuple[list[Channel], str | None]:
        """Channels between the members of a group that are on this host; all members of the group call it.

        Args:
            members: of the group, by their numbers.
            count: how many channels.
            exchange: among them.

        Returns:
            The channels, none where this process is alone on its host; and why there are none for anybody, if so.
        """
        here = next(part for part in self.companions(members) if self.number in part)
        places: list[int] = []
        problem = self._problem
        try:
            if len(here) > 1 and problem is None:
                places = [self.arena.take(BYTES) for _ in range(count)]
        except NoRoom as error:
            problem = str(error)
        records = exchange({"problem": problem, "places": places})
        if note := _note(records):
            return [], note
        if len(here) == 1:
            return [], None
        memories = [self.arena if n == self.number else self._neighbours[n].memory for n in here]
        lives = Lives({rank: self._neighbours[n] for rank, n in enumerate(here) if n != self.number})
        names = [f"worker {n}" for n in here]
        ranks = [members.index(n) for n in here]
        made = []
        for index in range(count):
            starts = [records[rank]["places"][index] for rank in ranks]
            made.append(Channel(self.arena, memories, starts, here.index(self.number), names, lives))
            self.progress.add(made[-1])
        return made, None


def _note(records: Sequence[dict[str, Any]]) -> str | None:
    """What the first of the workers with a problem says of it."""
    for rank, record in enumerate(records):
        if record["problem"] is not None:
            return f"Collectives go through sockets, as memory cannot be shared: worker {rank}: {record['problem']}"
    return None
