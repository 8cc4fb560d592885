"""Workers and islands that come and go: has those end that are to go, and starts those that are to come."""

from __future__ import annotations

from dataclasses import replace

from verbund.cluster.islands import Islands
from verbund.cluster.keys import Keys
from verbund.cluster.losses import Losses
from verbund.cluster.membership import Membership
from verbund.cluster.process import ProcessSpec
from verbund.cluster.replacements import Replacements
from verbund.cluster.requests import Requests
from verbund.cluster.roster import Roster, tell
from verbund.cluster.starts import Starts


class Changes:
    """Between the processes and those who decide who takes part.

    Args:
        losses: who has failed, and where others are placed.
        roster: all processes.
        starts: what is on its way.
        keys: where those that meet find each other.
        replacements: told of the processes of islands that come; None: none is replaced.
        membership: of workers that come and go; None: they do not.
        requests: of other commands, about the members or islands.
        islands: those of a training with servers that come and go; None: they do not.
    """

    def __init__(
        self,
        losses: Losses,
        roster: Roster,
        starts: Starts,
        keys: Keys,
        replacements: Replacements | None,
        membership: Membership | None,
        requests: Requests | None,
        islands: Islands | None,
    ) -> None:
        self._losses, self._roster, self._starts, self._keys = losses, roster, starts, keys
        self._replacements, self._membership = replacements, membership
        self._requests, self._islands = requests, islands
        self.silent_ends = False
        """Whether somebody was lost since the newest era whose end its peers do not notice, as its machine is gone."""

    def members(self, closing: bool) -> None:
        """Tells of a new era, if there is one, and starts whoever is to join.

        Args:
            closing: the run stops, and nobody joins any more.
        """
        membership = self._membership
        if membership is None:
            return
        membership.closing = closing
        over = bool(self._losses.failures) or self._losses.joint is not None
        if self._requests is not None:
            self._requests.turn(membership, ending=over or closing)
        if over:
            return
        dismissed = membership.dismissed()
        self._starts.drop("worker", dismissed)
        for watched in self._roster:
            if not watched.replaced and not watched.leaves and watched.process.spec.rank in dismissed:
                watched.replaced = True
                self._losses.kill(watched)
        if (change := membership.change()) is not None:
            era, gone = change
            for watched in self._roster:
                watched.leaves |= not watched.replaced and watched.process.spec.rank in gone
            self._keys.forget(f"era {era.number - 2}")
            self._roster.tell_all("regroup", era=era.number, members=list(era.members), cut=self.silent_ends)
            self.silent_ends = False
        for spec in membership.due():
            self._starts.add([self._losses.placed(spec)])

    def islands(self, closing: bool) -> None:
        """Has those islands end that are to go, and starts those that are to come.

        Args:
            closing: the run stops, and none comes any more.
        """
        islands = self._islands
        if islands is None:
            return
        over = bool(self._losses.failures) or closing or self._roster.any_done
        if self._requests is not None:
            self._requests.turn(islands, ending=over)
        islands.settle()
        if over or islands.complete:
            return
        for watched in self._roster:
            if watched.process.spec.role == "coordinator" and watched.exit is None:
                tell(watched, "islands", count=islands.islands)  # again and again: another may sit there now
        for unit in islands.due():
            fresh: list[ProcessSpec] = []
            for spec in unit:
                fresh.append(self._losses.placed(replace(spec, life=self._roster.lives_of(spec)), *fresh))
            if self._replacements is not None:
                self._replacements.add(fresh)
            self._starts.add(fresh)
