"""The supervisor: watches a run's processes, ends them in order at the first failure, and names the first cause."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from verbund.cluster.islands import Islands
from verbund.cluster.keys import Keys
from verbund.cluster.membership import Membership
from verbund.cluster.process import Cluster, Exit, Process, ProcessSpec
from verbund.cluster.replacements import Replacements
from verbund.cluster.requests import Requests
from verbund.cluster.roster import Roster, tell
from verbund.cluster.starts import Starts
from verbund.cluster.watched import Failed, Failure, Watched, patience, standing_still
from verbund.cluster.worker import describe
from verbund.comm.wire import Message, WireError
from verbund.errors import ClusterLost, Interrupted, VerbundError, from_record
from verbund.interrupts import Interrupts
from verbund.job import Cluster as Limits

RELEASED = "released"
"""By what a worker stops whose island goes while the others train."""
MEETING = "meeting the other workers"
"""What a worker does that has not met its peers."""
_TICK = 0.2
_CAUSE_SECONDS = 2.0
"""How long the first cause may take to arrive after its consequences."""
_END_SECONDS = 1.0
"""How long processes get to end when another has failed."""
_EXIT_SECONDS = 2.0
"""How long the news of a process's end may take."""
_STANDSTILL_SECONDS = 1.0
"""How late a turn of the supervisor's own loop may come before it blames itself."""

Handle = Callable[[Process, Message], None]


class Supervisor:
    """Runs processes to their end.

    Args:
        cluster: where they run.
        limits: the job's deadlines.
        handle: gets every message that is not about life and death (progress, checkpoints, …).
        interrupts: the first lets all processes finish their step, save and end; the second ends them at once.
        replacements: of processes that are lost; None: none is replaced, the others end too.
        membership: of workers that come and go, so that what one comes to in the end is what all come to; None: they
            do not.
        requests: of other commands, about the members or islands.
        islands: those of a training with servers that come and go; None: they do not.
    """

    def __init__(
        self,
        cluster: Cluster,
        limits: Limits,
        handle: Handle,
        interrupts: Interrupts | None = None,
        replacements: Replacements | None = None,
        membership: Membership | None = None,
        requests: Requests | None = None,
        islands: Islands | None = None,
    ) -> None:
        self._cluster = cluster
        self._limits = limits
        self._handle = handle
        self._roster = Roster()
        self.tell_all = self._roster.tell_all
        """Sends a message to all processes that live."""
        self._keys = Keys()
        self._failures: list[Failure] = []
        self._interrupts = interrupts or Interrupts()
        self._stop_sent = False
        self._lost = False
        self._replacements = replacements
        self._membership, self._requests, self._islands = membership, requests, islands
        told = {key: getattr(limits, key) for key in ("heartbeat", "orphan_grace", "lost_after")}
        self._starts = Starts(cluster, told)
        self._joint: tuple[float, dict[str, Any]] | None = None
        """When the first said that all is done, where that holds for all, and what it comes to."""
        self.preempted: str | None = None
        """The process that its machine has asked to end, where all end for that, to begin again."""
        self._ending: float | None = None
        """Until when the others may end by themselves, after a failure."""
        self._silent_ends = False
        """Whether somebody was lost since the newest era whose end its peers do not notice, as its machine is gone."""
        self.warnings: list[str] = []
        """What went wrong without harm to the result."""

    def run(self, specs: list[ProcessSpec]) -> list[dict[str, Any]]:
        """Starts the processes and waits for all to end; their results in the order of `specs`, or the one that all
        came to.

        Raises:
            Failed: with the first cause, after everything has ended.
        """
        try:
            processes = self._starts.at_once(specs)
        except ClusterLost as error:
            raise Failed([Failure("supervisor", time.monotonic(), error, secondary=False)]) from None
        with selectors.DefaultSelector() as selector:
            selector.register(self._cluster.fileno(), selectors.EVENT_READ, None)
            if self._requests is not None:
                selector.register(self._requests, selectors.EVENT_READ, None)
            self._watch(processes, selector)
            try:
                self._loop(selector)
            finally:
                self._starts.clear()
        if self._failures:
            raise Failed(self._ordered())
        results = {w.name: w.result or {} for w in self._roster if not w.replaced}
        if self._joint is not None:
            return [self._joint[1]]
        return [results.get((spec.role, spec.rank), {}) for spec in specs]

    def _loop(self, selector: selectors.BaseSelector) -> None:
        turned = time.monotonic()
        while (waiting := self._roster.waiting) or self._starts:
            for key, _ in selector.select(_TICK):
                # All that has come: what TLS has decrypted already makes no descriptor readable.
                while key.data is not None and key.data.connected and key.data.process.connection.ready():
                    self._receive(key.data, selector)
            # Always, not only when there is something to read: an exit may have been read while processes were started.
            if not self._lost:
                self._exits(selector)
            now = time.monotonic()
            self._discount(now - turned)
            turned = now
            if self._interrupts.count and not self._stop_sent:
                self._stop_sent = True
                self.tell_all("stop")
            self._start(selector)
            self._change_members()
            self._change_islands()
            self._end_latecomers()
            self._finish_servers()
            if self._interrupts.count > 1 and not self._failures:
                self._fail(None, Interrupted("interrupted twice: ended without a checkpoint"), secondary=False)
            if not self._failures:
                self._deadlines()
            if self._failures and self._ending is None:
                primary = any(not failure.secondary for failure in self._failures)
                if primary or time.monotonic() - self._failures[0].at > _CAUSE_SECONDS:
                    self._starts.clear()
                    self.tell_all("end")
                    self._ending = time.monotonic() + _END_SECONDS
            if self._ending is not None and time.monotonic() > self._ending:
                for watched in waiting:
                    if watched.exit is None:
                        self._kill(watched)
            self._overdue([w for w in waiting if w.exit is None], selector)

    def _receive(self, watched: Watched, selector: selectors.BaseSelector) -> None:
        try:
            message = watched.process.connection.receive(self._limits.lost_after)
        except WireError:
            selector.unregister(watched.process.connection)  # its exit tells the rest
            watched.connected = False
            watched.over = watched.over or time.monotonic()
            return
        watched.heard = time.monotonic()
        if message.kind == "beat":
            watched.beaten = True
            watched.pauses.sign(watched.heard)
            watched.doing = str(message.fields["doing"])
            watched.step = int(message.fields["step"])
            watched.since = watched.heard - float(message.fields["seconds"])
        elif message.kind == "done":
            watched.result = dict(message.fields["result"] or {})
            watched.over = watched.heard
            if self._islands is not None and watched.result.get("stopped_by") == RELEASED:
                self._islands.ended(watched.process.spec.rank)
                watched.replaced = True
            elif watched.leaves:
                watched.replaced = True
            elif self._joint is None and self._membership is not None and not watched.replaced:
                self._joint = (watched.heard, watched.result)
        elif message.kind == "failed":
            watched.failed = True
            watched.over = watched.heard
            fields = message.fields
            if self._membership is not None and (watched.leaves or self._only_joins(watched)):
                self._lose(watched, ClusterLost(f"{watched.process.spec.name} failed: {fields['error']['what']}"))
            elif self._roster.matters(watched):  # else it is a consequence
                self._fail(watched, from_record(fields["error"]), bool(fields["secondary"]), fields.get("trace"))
        elif message.kind == "unreachable":
            if self._roster.matters(watched) and not self._ended_by_us():
                self._fail(watched, _unreachable(watched.process, message.fields), secondary=False)
        elif message.kind == "leaving":
            self._leave(watched)
        elif not watched.replaced:  # who was given up on has no say any more
            try:
                if message.kind == "ready" and self._islands is not None:
                    self._islands.ready(watched.process.spec.rank)
                elif message.kind == "store":
                    self._keys.answer(watched.process.connection, message)
                elif message.kind in ("ready", "met") and self._membership is not None:
                    self._hear_member(watched, message)
                else:
                    self._handle(watched.process, message)
            except Exception as error:
                described = describe(error)
                self._fail(None, from_record(described["error"]), secondary=False, trace=described["trace"])

    def _exits(self, selector: selectors.BaseSelector) -> None:
        for ended in self._cluster.exits():
            watched = self._roster.of(ended)
            if watched is None:
                continue
            while watched.connected and watched.process.connection.ready():
                self._receive(watched, selector)  # what it said last counts before that it ended
            watched.exit = ended
            if watched.silence is not None and ended.lost is None:
                error, last = watched.silence  # it may have gone on for a while after its last sign of life
                error.what = error.what.replace(last, f"{ended.doing} (step {ended.step})")
            if (
                watched.result is None
                and not watched.failed
                and self._roster.matters(watched)
                and not self._ended_by_us()
            ):
                if ended.lost is not None and not self._cluster.replaced(ended.host):
                    self._fail(None, ended.lost, secondary=False)
                else:
                    self._silent_ends |= ended.lost is not None
                    self._lose(watched, ended.lost or self._death(watched, ended))

    # -- replacements --------------------------------------------------------------------------------------------

    def _lose(self, watched: Watched, error: ClusterLost, charged: bool = True) -> None:
        """A process is lost: its unit is replaced, or the run fails."""
        if not self._roster.matters(watched):
            self._kill(watched)
            return
        if self._joint is not None:
            watched.result = self._joint[1]  # only its last words are missing
            return
        if self._membership is not None:
            self._lose_member(watched, error)
            return
        fresh = self._replacement(watched.process.spec, watched, error, charged)
        if fresh is None:
            return
        names = {(spec.role, spec.rank) for spec in fresh}
        for other in self._roster:
            if other.name in names:
                other.replaced = True
                if other.exit is None:
                    self._kill(other)
        gone = {f"{role} {rank}" for role, rank in names}
        # What its peers said of its end is a consequence.
        self._failures = [failure for failure in self._failures if not (failure.secondary and failure.process in gone)]
        self._starts.add(fresh)

    def _replacement(
        self, lost: ProcessSpec, watched: Watched | None, error: ClusterLost, charged: bool = True
    ) -> list[ProcessSpec] | None:
        """The processes that take the place of a lost one's unit; None, and a failure, if there are none any more."""
        budget = self._replacements
        fresh = budget.of(lost, error.what, charged) if budget is not None else None
        if fresh is None:
            if budget is not None:
                budget.budget.explain(error)
            self._fail(watched, error, secondary=False)
            return None
        return [self._placed(spec) for spec in fresh]

    def _placed(self, spec: ProcessSpec, *more: ProcessSpec) -> ProcessSpec:
        return self._roster.placed(spec, [*self._starts.coming, *more])

    def _start(self, selector: selectors.BaseSelector) -> None:
        """Watches those that have come, and sees to those that do not."""
        for unit, outcome in self._starts.turn(lambda unit: not self._failures and self._roster.have_ended(unit)):
            if isinstance(outcome, ClusterLost):
                self._not_started(unit, outcome)
            else:
                self._watch(outcome, selector)

    def _not_started(self, unit: list[ProcessSpec], error: ClusterLost) -> None:
        membership = self._membership
        if membership is None:
            if (again := self._replacement(unit[0], None, error)) is not None:
                self._starts.add(again)
        elif not membership.lost(unit[0].rank, error.what):
            membership.budget.explain(error)
            self._fail(None, error, secondary=False)

    def _watch(self, processes: list[Process], selector: selectors.BaseSelector) -> None:
        for process in processes:
            watched = self._roster.add(process)
            selector.register(process.connection, selectors.EVENT_READ, watched)
            if self._stop_sent:
                tell(watched, "stop")

    # -- workers that come and go ----------------------------------------------------------------------------------

    def _only_joins(self, watched: Watched) -> bool:
        """Whether it is started and has no place yet."""
        membership, rank = self._membership, watched.process.spec.rank
        return membership is not None and not watched.replaced and not membership.is_member(rank)

    def _lose_member(self, watched: Watched, error: ClusterLost, charged: bool = True) -> None:
        membership = self._membership
        assert membership is not None
        left, watched.replaced = watched.leaves, True
        if watched.exit is None:
            self._kill(watched)
        # What its peers say of its end is a consequence.
        self._failures = [failure for failure in self._failures if not failure.secondary]
        if not left and not membership.lost(watched.process.spec.rank, error.what, charged):
            membership.budget.explain(error)
            self._fail(watched, error, secondary=False)

    def _leave(self, watched: Watched) -> None:
        """A process was asked by its machine to end."""
        if (
            self._stop_sent
            or self._joint is not None
            or not self._roster.matters(watched)
            or watched.result is not None
        ):
            return
        error = ClusterLost(f"{watched.process} was asked to end")
        if self._membership is not None:
            if not self._membership.leave(watched.process.spec.rank):
                self._lose_member(watched, error, charged=False)
        elif self._replacements is not None and self._replacements.units:
            self._lose(watched, error, charged=False)
        elif self.preempted is None:
            self.preempted = watched.process.spec.name
            self.tell_all("stop")

    def _hear_member(self, watched: Watched, message: Message) -> None:
        assert self._membership is not None
        rank = watched.process.spec.rank
        if message.kind == "ready":
            self._membership.ready(rank)
        else:
            self._membership.met(rank, int(message.fields["era"]))

    def _change_members(self) -> None:
        """Tells of a new era, if there is one, and starts whoever is to join."""
        membership = self._membership
        if membership is None:
            return
        membership.closing = self._stop_sent
        over = bool(self._failures) or self._joint is not None
        if self._requests is not None:
            self._requests.turn(membership, ending=over or self._stop_sent)
        if over:
            return
        dismissed = membership.dismissed()
        self._starts.drop("worker", dismissed)
        for watched in self._roster:
            if not watched.replaced and not watched.leaves and watched.process.spec.rank in dismissed:
                watched.replaced = True
                self._kill(watched)
        if (change := membership.change()) is not None:
            era, gone = change
            for watched in self._roster:
                watched.leaves |= not watched.replaced and watched.process.spec.rank in gone
            self._keys.forget(f"era {era.number - 2}")
            self.tell_all("regroup", era=era.number, members=list(era.members), cut=self._silent_ends)
            self._silent_ends = False
        for spec in membership.due():
            self._starts.add([self._placed(spec)])

    def _change_islands(self) -> None:
        """Has those islands end that are to go, and starts those that are to come."""
        islands = self._islands
        if islands is None:
            return
        over = bool(self._failures) or self._stop_sent or self._roster.any_done
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
                fresh.append(self._placed(replace(spec, life=self._roster.lives_of(spec)), *fresh))
            if self._replacements is not None:
                self._replacements.add(fresh)
            self._starts.add(fresh)

    def _end_latecomers(self) -> None:
        """Ends those that were started when the others were done, and whom they wait for in vain."""
        if self._joint is None:
            return
        self._starts.clear()
        since, result = self._joint
        passed = time.monotonic() - since
        for watched in self._roster:
            # Of what it does now it has told since then. Nobody needs one that has none of what was trained.
            meets = watched.doing == MEETING and passed > 2 * self._limits.heartbeat
            if self._membership is not None and not watched.leaves:
                meets |= not self._membership.holds(watched.process.spec.rank)
            if watched.result is None and not watched.replaced and (meets or passed > self._limits.stop_grace):
                watched.result = result
                self._kill(watched)

    def _finish_servers(self) -> None:
        """Those that work for others are done when all others are."""
        if self._roster.finishing or any(not spec.serves for spec in self._starts.coming):
            return
        current = [w for w in self._roster if not w.replaced]
        if all(w.result is not None for w in current if not w.process.spec.serves):
            self._roster.finishing = True
            self._starts.clear()
            for watched in current:
                if watched.process.spec.serves:
                    watched.over = time.monotonic()
                    tell(watched, "finish")

    def _ended_by_us(self) -> bool:
        return self._ending is not None or any(not failure.secondary for failure in self._failures)

    def _death(self, watched: Watched, ended: Exit) -> ClusterLost:
        fix = "The kernel kills what uses too much memory: `dmesg` tells" if ended.status == -9 else None
        return ClusterLost(f"{watched.process} {ended} while {ended.doing} (step {ended.step})", fix=fix)

    def _discount(self, passed: float) -> None:
        """Takes a standstill of this process itself (it was suspended, or saved for long) off the others' silence."""
        late = passed - _TICK
        if late > _STANDSTILL_SECONDS:
            self._roster.discount(late)

    def _overdue(self, waiting: list[Watched], selector: selectors.BaseSelector) -> None:
        """Ends the wait for exits that do not come: a process may hang in its last moments, or the cluster be stuck."""
        if self._lost or not waiting:
            return
        if self._membership is not None and not self._failures:
            # The others wait for the news of one whose line is broken: it need not be the last.
            waiting = [
                w for w in waiting if not w.connected and w.result is None and self._roster.matters(w)
            ] or waiting
        since = [w.over for w in waiting if w.over is not None]
        killed = all(w.killed for w in waiting)
        limit = _EXIT_SECONDS if killed else self._limits.stop_grace
        if len(since) < len(waiting) or time.monotonic() - max(since) < limit:
            return
        if not killed:
            for watched in waiting:
                self._kill(watched)
            return
        error = self._cluster.abandon([w.process for w in waiting])
        self._lost = True
        selector.unregister(self._cluster.fileno())
        if all(w.result is not None for w in self._roster if self._roster.matters(w)):
            self.warnings.append(error.what)  # the work is done
        elif all(failure.secondary for failure in self._failures):  # else the cause is known
            self._fail(None, error, secondary=False)
        self._roster.all_ended()

    def _kill(self, watched: Watched) -> None:
        self._cluster.kill(watched.process)
        if not watched.killed:
            watched.killed, watched.over = True, time.monotonic()

    def _deadlines(self) -> None:
        now = time.monotonic()
        living = self._roster.living
        for watched in living:
            silent = now - watched.heard
            if silent > patience(watched, living, self._limits, self._cluster):
                last = f"{watched.doing} (step {watched.step})"
                what = f"{watched.process} has given no sign of life for {silent:.0f} s; last known: {last}"
                error = ClusterLost(what)
                watched.silence = error, last
                self._lose(watched, error)
                return
        if (late := standing_still(living, self._limits.step_deadline)) is not None:
            culprit, error = late
            if self._membership is not None and self._only_joins(culprit):
                self._lose(culprit, error)  # nobody waits for it
            else:
                self._fail(culprit, error, secondary=False)

    def _fail(self, watched: Watched | None, error: VerbundError, secondary: bool, trace: str | None = None) -> None:
        name = watched.process.spec.name if watched else "supervisor"
        self._failures.append(Failure(name, time.monotonic(), error, secondary, trace))

    def _ordered(self) -> list[Failure]:
        """The first cause first: what is a consequence of another's end comes last."""
        return sorted(self._failures, key=lambda failure: (failure.secondary, failure.at))


def _unreachable(process: Process, told: Mapping[str, Any]) -> ClusterLost:
    """That a process does not reach another's machine, which this one does: else that would be lost by now."""
    return ClusterLost(
        f"{process} does not reach {told['address']}: nothing was acknowledged for {float(told['seconds']):.0f} s, "
        "though both reach this machine",
        where="network",
        fix="`verbund doctor JOB --network` measures every link; look at what lies between the two",
    )
