"""The supervisor's side of the borders between islands that train alone: hears what workers ask, and lets the quorum
answer."""

from __future__ import annotations

import time
from collections.abc import Callable

from verbund.cluster.keys import Keys
from verbund.cluster.membership import Era
from verbund.cluster.process import Cluster
from verbund.cluster.quorum import Asked, Quorum
from verbund.cluster.roster import Roster, tell
from verbund.cluster.watched import Watched
from verbund.comm.wire import Message
from verbund.job import Cluster as Limits

KINDS = ("border", "waits", "met")
"""The messages that it hears."""


class AtBorders:
    """Between the workers and the quorum.

    Args:
        quorum: who decides.
        roster: all processes.
        keys: where those that meet find each other.
        cluster: where they run.
        limits: the job's deadlines.
    """

    def __init__(self, quorum: Quorum, roster: Roster, keys: Keys, cluster: Cluster, limits: Limits) -> None:
        self.quorum, self._roster, self._keys = quorum, roster, keys
        self._cluster, self._limits = cluster, limits
        quorum.announce = self._announcing(quorum.announce)

    def hear(self, watched: Watched, message: Message) -> None:
        """A worker says something of `KINDS`."""
        rank, fields = watched.process.spec.rank, message.fields
        if message.kind == "met":
            self.quorum.met(rank)
        elif message.kind == "waits":
            self.quorum.waits(rank)
        else:
            number = int(fields["number"])

            def reply(answer: str, era: Era, holders: list[int]) -> None:
                said = {"answer": answer, "era": era.number, "members": list(era.members), "holders": holders}
                tell(watched, "answer", number=number, **said)

            flags = {key: bool(fields[key]) for key in ("ok", "holds", "joins", "combines")}
            self.quorum.ask(rank, Asked(str(fields["what"]), int(fields["step"]), reply, **flags))

    def turn(self, closing: bool) -> list[Watched]:
        """Answers islands that are at a border, and leaves out those that do not come.

        Args:
            closing: nobody comes back any more.

        Returns:
            one worker of each island that was asked to end and has nothing left to do.

        Raises:
            ClusterLost: if too few islands are there, and nobody can come or has come.
        """
        self.quorum.closing |= closing
        self.quorum.turn(time.monotonic(), self._stalled)
        gone = self.quorum.departed()
        return [
            next(w for w in self._roster if self._roster.matters(w) and self.quorum.of(island, w.process.spec.rank))
            for island in gone
        ]

    def needed(self, living: list[Watched]) -> list[Watched]:
        """Those of whom progress is expected: who wants to come back waits for the others' next exchange."""
        return [w for w in living if not self.quorum.wants_back(w.process.spec.rank)]

    def _announcing(self, besides: Callable[[Era, bool], None]) -> Callable[[Era, bool], None]:
        """All workers are told of an era before any of them is answered in it."""

        def announce(era: Era, broken: bool) -> None:
            self._roster.tell_all("regroup", era=era.number, members=self.quorum.ranks(), cut=broken)
            self._keys.forget_eras("islands", era.number - 2)
            besides(era, broken)

        return announce

    def _stalled(self, rank: int) -> bool:
        """Whether a worker gives no signs of life, or is known to be stopped."""
        for watched in self._roster.waiting:
            if watched.process.spec.rank == rank and not watched.replaced:
                silent = time.monotonic() - watched.heard
                return silent > 2 * self._limits.heartbeat or self._cluster.suspended(watched.process)
        return False
