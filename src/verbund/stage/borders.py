"""Borders: how islands that train alone go on without one that is lost or late, and take it in again; a worker's side.

The supervisor decides (`cluster.quorum`). Before islands do something together all ask it, and after that whether it is
done by all: only then it counts. If not, they gather, which begins an era: those that take part meet anew, and who
comes back gets from the memory of one that has it what they have in common (`stage.handing_over`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from verbund.cluster.quorum import GATHER, JOIN, LAST, ON, OUT
from verbund.cluster.worker import Worker
from verbund.comm.peer_lost import PeerLost
from verbund.comm.wire import Deadline, WireError
from verbund.errors import ClusterLost

WAITING, COMING_BACK = "waiting for the other islands", "waiting to take part again"
"""What a worker does at a border; and what one does whose island was left out."""


class LeftOut(Exception):
    """The others go on without this island."""


@dataclass(frozen=True)
class Gathered:
    """Who takes part from now on.

    Args:
        era: its number.
        members: the islands.
        holders: those of them that have what was trained.
    """

    era: int
    members: tuple[int, ...]
    holders: tuple[int, ...]


Regroup = Callable[[Gathered], None]
"""Goes on among the members of an era; raises PeerLost if one of them is lost meanwhile."""


class Borders:
    """What a worker asks at borders.

    Args:
        worker: the line to the supervisor.
        deadline: seconds that an answer may take.
    """

    def __init__(self, worker: Worker, deadline: float) -> None:
        self._worker, self._deadline = worker, deadline
        self.regroup: Regroup = lambda _: None
        """See there."""
        self._era = 0
        """Of this worker's groups."""
        self._holds = not worker.joins
        """Whether this worker has what was trained."""
        self._one_goes = False
        self._met = True
        """Whether its groups are those of the era that it was told of last."""

    @property
    def left_out(self) -> bool:
        """Whether the others are known to go on without this worker's island."""
        era = self._worker.era
        return era.number > self._era and self._worker.spec.rank not in era.members

    def gather(self, step: int, joins: bool, combines: bool = True) -> None:
        """All that take part meet; see `Crossing.gather`.

        Args:
            step: how many are done.
            joins: whether others may come back here.
            combines: whether an exchange follows, which needs the quorum.

        Raises:
            LeftOut: if this worker's island is no member any more.
        """
        while True:
            self._worker.doing(WAITING, step)
            _, gathered = self._ask(GATHER, step, self._met, joins=joins, combines=combines)
            if gathered.era == self._era or self._go_on(gathered):
                return

    def join(self) -> None:
        """Waits until the others take this island in, and goes on with them."""
        self._worker.doing(COMING_BACK, 0)
        self._holds = False
        _, gathered = self._ask(JOIN, 0, True)
        while not self._go_on(gathered):
            _, gathered = self._ask(GATHER, 0, False, joins=True)

    def waits(self, step: int) -> None:
        """This worker has come to where something is done together."""
        self._worker.doing(WAITING, step)
        self._worker.send("waits")

    def agree(self, what: str, step: int, ok: bool = True) -> bool:
        """Whether what was done together is done, by all; see `Crossing.agree`.

        Raises:
            LeftOut: if this worker's island is no member any more.
        """
        if not ok:
            self._worker.cut()  # who waits for this worker is to ask, too
        self._worker.doing(WAITING, step)
        answer, _ = self._ask(what, step, ok and self._met)
        self._one_goes = answer == LAST
        return answer in (ON, LAST)

    def part(self, step: int) -> None:
        """After an exchange: if an island goes with it, the others meet, and share the samples among them at once.

        Raises:
            LeftOut: if it is this worker's island that goes.
        """
        if self._one_goes:
            self._one_goes = False
            self.gather(step, joins=False, combines=False)

    def together(self, what: str, step: int, done: Callable[[], bool] = lambda: True) -> None:
        """Returns once all that take part have come to the same border, and each has done its part there.

        Args:
            what: that is.
            step: how many are done.
            done: does it, and tells whether it could; is repeated among those who are left.

        Raises:
            LeftOut: if this worker's island is no member any more.
        """
        while not self.agree(what, step, done()):
            self.gather(step, joins=False, combines=False)

    def _go_on(self, gathered: Gathered) -> bool:
        """Goes on among the members; False if one of them was lost before all had met."""
        self._worker.joins, self._met = False, False
        try:
            self.regroup(gathered)
        except PeerLost:
            if self._worker.orphaned:
                raise
            self._worker.cut()
            return False
        self._era, self._met, self._holds = gathered.era, True, True
        return True

    def _ask(self, what: str, step: int, ok: bool, joins: bool = False, combines: bool = False) -> tuple[str, Gathered]:
        fields = {"what": what, "step": step, "ok": ok, "holds": self._holds, "joins": joins, "combines": combines}
        # Who wants to come back waits for the others' next exchange, however far that is.
        while True:
            try:
                said = self._worker.ask("border", fields, {}, self._deadline).fields
                break
            except Deadline:
                if what != JOIN:
                    waited = f"for {self._deadline:.0f} s the supervisor has not said who takes part"
                    raise ClusterLost(waited) from None
            except WireError as error:
                raise PeerLost(f"the supervisor is gone: {error}") from None
        if said["answer"] == OUT:
            self._met = False
            raise LeftOut
        return said["answer"], Gathered(int(said["era"]), tuple(said["members"]), tuple(said["holders"]))
