"""What becomes of a run when one of its processes is lost: another takes its place, or the run fails of it."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from verbund.cluster.membership import Membership
from verbund.cluster.process import Cluster, ProcessSpec
from verbund.cluster.quorum import Quorum
from verbund.cluster.replacements import Replacements
from verbund.cluster.roster import Roster
from verbund.cluster.starts import Starts
from verbund.cluster.watched import Failure, Watched
from verbund.errors import ClusterLost, VerbundError


class Losses:
    """All failures, and the processes that take the places of lost ones.

    Args:
        cluster: where the processes run.
        roster: all processes.
        starts: what is on its way.
        replacements: of processes that are lost; None: none is replaced.
        membership: of workers that come and go; None: they do not.
        quorum: the islands that train alone; None: they do not.
    """

    def __init__(
        self,
        cluster: Cluster,
        roster: Roster,
        starts: Starts,
        replacements: Replacements | None,
        membership: Membership | None,
        quorum: Quorum | None,
    ) -> None:
        self._cluster, self._roster, self._starts = cluster, roster, starts
        self._replacements, self._membership, self._quorum = replacements, membership, quorum
        self.failures: list[Failure] = []
        self.joint: tuple[float, dict[str, Any]] | None = None
        """When the first said that all is done, where that holds for all, and what it comes to."""
        self.ending: float | None = None
        """Until when the others may end by themselves, after a failure."""

    def fail(self, watched: Watched | None, error: VerbundError, secondary: bool, trace: str | None = None) -> None:
        """The run fails, for what a process, or the supervisor itself, has come to."""
        name = watched.process.spec.name if watched else "supervisor"
        self.failures.append(Failure(name, time.monotonic(), error, secondary, trace))

    def ordered(self) -> list[Failure]:
        """The first cause first: what is a consequence of another's end comes last."""
        return sorted(self.failures, key=lambda failure: (failure.secondary, failure.at))

    def ended_by_us(self) -> bool:
        """Whether processes end because the run has failed."""
        return self.ending is not None or any(not failure.secondary for failure in self.failures)

    def kill(self, watched: Watched) -> None:
        """Ends a process at once."""
        self._cluster.kill(watched.process)
        if not watched.killed:
            watched.killed, watched.over = True, time.monotonic()

    def lose(self, watched: Watched, error: ClusterLost, charged: bool = True) -> None:
        """A process is lost: its unit is replaced, or the run fails."""
        if not self._roster.matters(watched):
            self.kill(watched)
            return
        if self.joint is not None:
            watched.result = self.joint[1]  # only its last words are missing
            return
        if self._membership is not None:
            self.lose_member(watched, error)
            return
        if self._quorum is not None and not self._quorum.lost(watched.process.spec.rank):
            self.fail(watched, error, secondary=False)
            return
        fresh = self._replacement(watched.process.spec, watched, error, charged)
        if fresh is None:
            return
        names = {(spec.role, spec.rank) for spec in fresh}
        for other in self._roster:
            if other.name in names:
                other.replaced = True
                if other.exit is None:
                    self.kill(other)
        gone = {f"{role} {rank}" for role, rank in names}
        # What its peers said of its end is a consequence.
        self.failures = [failure for failure in self.failures if not (failure.secondary and failure.process in gone)]
        self._starts.add(fresh)

    def lose_member(self, watched: Watched, error: ClusterLost, charged: bool = True) -> None:
        """A worker that may come and go is lost: another joins in its place, or the run fails."""
        membership = self._membership
        assert membership is not None
        left, watched.replaced = watched.leaves, True
        if watched.exit is None:
            self.kill(watched)
        # What its peers say of its end is a consequence.
        self.failures = [failure for failure in self.failures if not failure.secondary]
        if not left and not membership.lost(watched.process.spec.rank, error.what, charged):
            membership.budget.explain(error)
            self.fail(watched, error, secondary=False)

    def not_started(self, unit: list[ProcessSpec], error: ClusterLost) -> None:
        """A unit has not come."""
        membership = self._membership
        if membership is None:
            if (again := self._replacement(unit[0], None, error)) is not None:
                self._starts.add(again)
        elif not membership.lost(unit[0].rank, error.what):
            membership.budget.explain(error)
            self.fail(None, error, secondary=False)

    def placed(self, spec: ProcessSpec, *more: ProcessSpec) -> ProcessSpec:
        """Where a process runs that is to be started (`Roster.placed`)."""
        return self._roster.placed(spec, [*self._starts.coming, *more])

    def only_joins(self, watched: Watched) -> bool:
        """Whether it is started and has no place yet."""
        members, rank = self._membership or self._quorum, watched.process.spec.rank
        return members is not None and not watched.replaced and not members.is_member(rank)

    def _replacement(
        self, lost: ProcessSpec, watched: Watched | None, error: ClusterLost, charged: bool = True
    ) -> list[ProcessSpec] | None:
        """The processes that take the place of a lost one's unit; None, and a failure, if there are none any more."""
        budget = self._replacements
        fresh = budget.of(lost, error.what, charged) if budget is not None else None
        if fresh is None:
            if budget is not None:
                budget.budget.explain(error)
            self.fail(watched, error, secondary=False)
            return None
        if self._quorum is not None:  # the others have begun without it
            fresh = [replace(spec, settings={**spec.settings, "joins": True}) for spec in fresh]
        return [self.placed(spec) for spec in fresh]
