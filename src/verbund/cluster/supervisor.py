"""The supervisor: watches a run's processes, ends them in order at the first failure, and names the first cause."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable
from typing import Any

from verbund.cluster import at_borders
from verbund.cluster.at_borders import AtBorders
from verbund.cluster.changes import Changes
from verbund.cluster.islands import Islands
from verbund.cluster.keys import Keys
from verbund.cluster.losses import Losses
from verbund.cluster.membership import Membership
from verbund.cluster.process import Cluster, Process, ProcessSpec
from verbund.cluster.quorum import Quorum
from verbund.cluster.replacements import Replacements
from verbund.cluster.requests import Requests
from verbund.cluster.roster import Roster, tell
from verbund.cluster.starts import Starts
from verbund.cluster.watched import Failed, Failure, Watched, death, patience, standing_still, unreachable
from verbund.cluster.worker import describe
from verbund.comm.wire import Message, WireError
from verbund.errors import ClusterLost, Interrupted, from_record
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
        quorum: the islands that train alone, of which those that are lost or late are left out; None: they are not.
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
        quorum: Quorum | None = None,
    ) -> None:
        self._cluster = cluster
        self._limits = limits
        self._handle = handle
        self._roster = Roster()
        self.tell_all = self._roster.tell_all
        """Sends a message to all processes that live."""
        self._keys = Keys()
        self._interrupts = interrupts or Interrupts()
        self._stop_sent = False
        self._lost = False
        self._replacements = replacements
        self._membership, self._requests, self._islands = membership, requests, islands
        self._quorum = quorum
        told = {key: getattr(limits, key) for key in ("heartbeat", "orphan_grace", "lost_after")}
        self._starts = Starts(cluster, told)
        self._losses = Losses(cluster, self._roster, self._starts, replacements, membership, quorum)
        self._changes = Changes(
            self._losses, self._roster, self._starts, self._keys, replacements, membership, requests, islands
        )
        self._borders: AtBorders | None = None
        if quorum is not None:
            self._borders = AtBorders(quorum, self._roster, self._keys, cluster, limits)
        self.preempted: str | None = None
        """The process that its machine has asked to end, where all end for that, to begin again."""
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
        if self._losses.failures:
            raise Failed(self._losses.ordered())
        results = {w.name: w.result or {} for w in self._roster if not w.replaced}
        if self._losses.joint is not None:
            return [self._losses.joint[1]]
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
            self._changes.members(closing=self._stop_sent)
            self._changes.islands(closing=self._stop_sent)
            self._decide_borders()
            self._end_latecomers()
            self._finish_servers()
            if self._interrupts.count > 1 and not self._losses.failures:
                self._losses.fail(None, Interrupted("interrupted twice: ended without a checkpoint"), secondary=False)
            if not self._losses.failures:
                self._deadlines()
            if self._losses.failures and self._losses.ending is None:
                primary = any(not failure.secondary for failure in self._losses.failures)
                if primary or time.monotonic() - self._losses.failures[0].at > _CAUSE_SECONDS:
                    self._starts.clear()
                    self.tell_all("end")
                    self._losses.ending = time.monotonic() + _END_SECONDS
            if self._losses.ending is not None and time.monotonic() > self._losses.ending:
                for watched in waiting:
                    if watched.exit is None:
                        self._losses.kill(watched)
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
            elif self._losses.joint is None and not watched.replaced and self._all_come_to_the_same(watched):
                self._losses.joint = (watched.heard, watched.result)
        elif message.kind == "failed":
            watched.failed = True
            watched.over = watched.heard
            fields = message.fields
            if self._membership is not None and (watched.leaves or self._losses.only_joins(watched)):
                self._losses.lose(
                    watched, ClusterLost(f"{watched.process.spec.name} failed: {fields['error']['what']}")
                )
            elif self._roster.matters(watched):  # else it is a consequence
                self._losses.fail(watched, from_record(fields["error"]), bool(fields["secondary"]), fields.get("trace"))
        elif message.kind == "unreachable":
            if self._roster.matters(watched) and not self._losses.ended_by_us():
                self._losses.fail(watched, unreachable(watched.process, message.fields), secondary=False)
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
                elif message.kind in at_borders.KINDS and self._borders is not None:
                    self._borders.hear(watched, message)
                else:
                    self._handle(watched.process, message)
            except Exception as error:
                described = describe(error)
                self._losses.fail(None, from_record(described["error"]), secondary=False, trace=described["trace"])

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
                and not self._losses.ended_by_us()
            ):
                if ended.lost is not None and not self._cluster.replaced(ended.host):
                    self._losses.fail(None, ended.lost, secondary=False)
                else:
                    self._changes.silent_ends |= ended.lost is not None
                    self._losses.lose(watched, ended.lost or death(watched, ended))

    # -- starts ----------------------------------------------------------------------------------------------------

    def _start(self, selector: selectors.BaseSelector) -> None:
        """Watches those that have come, and sees to those that do not."""
        for unit, outcome in self._starts.turn(
            lambda unit: not self._losses.failures and self._roster.have_ended(unit)
        ):
            if isinstance(outcome, ClusterLost):
                self._losses.not_started(unit, outcome)
            else:
                self._watch(outcome, selector)

    def _watch(self, processes: list[Process], selector: selectors.BaseSelector) -> None:
        for process in processes:
            watched = self._roster.add(process)
            selector.register(process.connection, selectors.EVENT_READ, watched)
            if self._stop_sent:
                tell(watched, "stop")

    # -- workers that come and go ----------------------------------------------------------------------------------

    def _leave(self, watched: Watched) -> None:
        """A process was asked by its machine to end."""
        if (
            self._stop_sent
            or self._losses.joint is not None
            or not self._roster.matters(watched)
            or watched.result is not None
        ):
            return
        error = ClusterLost(f"{watched.process} was asked to end")
        if self._membership is not None:
            if not self._membership.leave(watched.process.spec.rank):
                self._losses.lose_member(watched, error, charged=False)
        elif self._quorum is not None and self._quorum.leave(watched.process.spec.rank):
            return  # it goes after the next exchange
        elif self._replacements is not None and self._replacements.units:
            self._losses.lose(watched, error, charged=False)
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

    # -- islands that train alone ------------------------------------------------------------------------------------

    def _decide_borders(self) -> None:
        """Answers islands that are at a border, leaves out those that do not come, and lets those go that may."""
        if self._borders is None or self._losses.failures or self._losses.joint is not None:
            return
        try:
            departed = self._borders.turn(closing=self._stop_sent)
        except ClusterLost as error:
            self._losses.fail(None, error, secondary=False)
            return
        for watched in departed:
            self._losses.lose(watched, ClusterLost(f"{watched.process} was asked to end"), charged=False)

    def _all_come_to_the_same(self, watched: Watched) -> bool:
        """Whether what this worker has come to in the end is what all have."""
        if self._quorum is not None:
            return self._quorum.is_member(watched.process.spec.rank)
        return self._membership is not None

    def _end_latecomers(self) -> None:
        """Ends those that were started when the others were done, and whom they wait for in vain."""
        if self._losses.joint is None:
            return
        self._starts.clear()
        since, result = self._losses.joint
        passed = time.monotonic() - since
        for watched in self._roster:
            # Of what it does now it has told since then. Nobody needs one that has none of what was trained.
            meets = watched.doing == MEETING and passed > 2 * self._limits.heartbeat
            if self._membership is not None and not watched.leaves:
                meets |= not self._membership.holds(watched.process.spec.rank)
            if self._quorum is not None:
                meets |= not self._quorum.is_member(watched.process.spec.rank)
            if watched.result is None and not watched.replaced and (meets or passed > self._limits.stop_grace):
                watched.result = result
                self._losses.kill(watched)

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

    def _discount(self, passed: float) -> None:
        """Takes a standstill of this process itself (it was suspended, or saved for long) off the others' silence."""
        late = passed - _TICK
        if late > _STANDSTILL_SECONDS:
            self._roster.discount(late)

    def _overdue(self, waiting: list[Watched], selector: selectors.BaseSelector) -> None:
        """Ends the wait for exits that do not come: a process may hang in its last moments, or the cluster be stuck."""
        if self._lost or not waiting:
            return
        if self._membership is not None and not self._losses.failures:
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
                self._losses.kill(watched)
            return
        error = self._cluster.abandon([w.process for w in waiting])
        self._lost = True
        selector.unregister(self._cluster.fileno())
        if all(w.result is not None for w in self._roster if self._roster.matters(w)):
            self.warnings.append(error.what)  # the work is done
        elif all(failure.secondary for failure in self._losses.failures):  # else the cause is known
            self._losses.fail(None, error, secondary=False)
        self._roster.all_ended()

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
                self._losses.lose(watched, error)
                return
        if self._borders is not None:
            living = self._borders.needed(living)
        if (late := standing_still(living, self._limits.step_deadline)) is not None:
            culprit, error = late
            if self._losses.only_joins(culprit):
                self._losses.lose(culprit, error)  # nobody waits for it
            else:
                self._losses.fail(culprit, error, secondary=False)
