"""The supervisor: watches a run's processes, ends them in order at the first failure, and names the first cause."""

from __future__ import annotations

import os
import selectors
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from verbund.cluster.process import Cluster, Exit, Process, ProcessSpec
from verbund.cluster.worker import describe
from verbund.comm.wire import Message, WireError
from verbund.errors import ClusterLost, Interrupted, VerbundError, from_record
from verbund.job import Cluster as Limits

_TICK = 0.2
_CAUSE_SECONDS = 2.0
"""How long the first cause may take to arrive after its consequences."""
_END_SECONDS = 1.0
"""How long processes get to end when another has failed."""

Handle = Callable[[Process, Message], None]


@dataclass
class Failure:
    """One process's end before its work was done."""

    process: str
    at: float
    error: VerbundError
    secondary: bool
    trace: str | None = None


@dataclass
class _Watched:
    process: Process
    heard: float
    doing: str = "starting"
    step: int = 0
    since: float = field(default_factory=time.monotonic)
    result: dict[str, Any] | None = None
    exit: Exit | None = None
    failed: bool = False
    connected: bool = True


class Failed(Exception):
    """All failures of a run, the first cause first."""

    def __init__(self, failures: list[Failure]) -> None:
        super().__init__(str(failures[0].error))
        self.failures = failures

    @property
    def error(self) -> VerbundError:
        return self.failures[0].error


class Supervisor:
    """Runs processes to their end.

    Args:
        cluster: where they run.
        limits: the job's deadlines.
        handle: gets every message that is not about life and death (progress, checkpoints, …).
    """

    def __init__(self, cluster: Cluster, limits: Limits, handle: Handle) -> None:
        self._cluster = cluster
        self._limits = limits
        self._handle = handle
        self._watched: dict[int, _Watched] = {}
        self._failures: list[Failure] = []
        self._interrupts = 0
        self._stop_sent = False
        self._lost = False

    @property
    def interrupted(self) -> bool:
        return self._interrupts > 0

    def stop(self) -> None:
        """Asks all workers to finish the step, save and end."""
        self._interrupts = max(self._interrupts, 1)

    def run(self, specs: list[ProcessSpec]) -> list[dict[str, Any]]:
        """Starts the processes and waits for all to end; their results in the order of `specs`.

        Raises:
            Failed: with the first cause, after everything has ended.
        """
        settings = {
            "heartbeat": self._limits.heartbeat,
            "orphan_grace": self._limits.orphan_grace,
            "store": f"store-{os.urandom(8).hex()}",
        }
        specs = [ProcessSpec(**{**s.record(), "settings": {**s.settings, **settings}}) for s in specs]
        with _Signals(self._interrupt):
            try:
                processes = self._cluster.start(specs, 60.0)
            except ClusterLost as error:
                raise Failed([Failure("cluster", time.monotonic(), error, secondary=False)]) from None
            now = time.monotonic()
            self._watched = {p.pid: _Watched(p, now) for p in processes}
            with selectors.DefaultSelector() as selector:
                selector.register(self._cluster.fileno(), selectors.EVENT_READ, None)
                for watched in self._watched.values():
                    selector.register(watched.process.connection, selectors.EVENT_READ, watched)
                self._loop(selector)
        if self._failures:
            raise Failed(self._ordered())
        return [w.result or {} for p in processes for w in (self._watched[p.pid],)]

    def _loop(self, selector: selectors.BaseSelector) -> None:
        ending: float | None = None
        while any(w.exit is None for w in self._watched.values()):
            for key, _ in selector.select(_TICK):
                if key.data is not None and key.data.connected:
                    self._receive(key.data, selector)
            # Always, not only when there is something to read: an exit may have been read while processes were started.
            if not self._lost:
                self._exits(selector)
            if self._interrupts and not self._stop_sent:
                self._stop_sent = True
                self._tell_all("stop")
            if self._interrupts > 1 and not self._failures:
                self._fail(None, Interrupted("interrupted twice: ended without a checkpoint"), secondary=False)
            if not self._failures:
                self._deadlines()
            if self._failures and ending is None:
                primary = any(not failure.secondary for failure in self._failures)
                if primary or time.monotonic() - self._failures[0].at > _CAUSE_SECONDS:
                    self._tell_all("end")
                    ending = time.monotonic() + _END_SECONDS
            if ending is not None and time.monotonic() > ending:
                for watched in self._watched.values():
                    if watched.exit is None:
                        self._cluster.kill(watched.process)

    def _receive(self, watched: _Watched, selector: selectors.BaseSelector) -> None:
        try:
            message = watched.process.connection.receive(self._limits.lost_after)
        except WireError:
            selector.unregister(watched.process.connection)  # its exit tells the rest
            watched.connected = False
            return
        watched.heard = time.monotonic()
        if message.kind == "beat":
            watched.doing = str(message.fields["doing"])
            watched.step = int(message.fields["step"])
            watched.since = watched.heard - float(message.fields["seconds"])
        elif message.kind == "done":
            watched.result = dict(message.fields["result"] or {})
        elif message.kind == "failed":
            watched.failed = True
            fields = message.fields
            self._fail(watched, from_record(fields["error"]), bool(fields["secondary"]), fields.get("trace"))
        else:
            try:
                self._handle(watched.process, message)
            except Exception as error:
                described = describe(error)
                self._fail(None, from_record(described["error"]), secondary=False, trace=described["trace"])

    def _exits(self, selector: selectors.BaseSelector) -> None:
        try:
            exits = list(self._cluster.exits())
        except ClusterLost as error:
            self._lost = True
            selector.unregister(self._cluster.fileno())
            self._fail(None, error, secondary=False)
            exits = [Exit(pid, -9) for pid, w in self._watched.items() if w.exit is None]
            for ended in exits:
                self._watched[ended.pid].exit = ended
            return
        for ended in exits:
            watched = self._watched.get(ended.pid)
            if watched is None:
                continue
            while watched.connected and watched.process.connection.ready():
                self._receive(watched, selector)  # what it said last counts before that it ended
            watched.exit = ended
            if watched.result is None and not watched.failed and not self._ended_by_us():
                self._fail(watched, self._death(watched, ended), secondary=False)

    def _ended_by_us(self) -> bool:
        return any(not failure.secondary for failure in self._failures)

    def _death(self, watched: _Watched, ended: Exit) -> ClusterLost:
        fix = "`verbund resume` continues from the last checkpoint"
        if ended.status == -9:
            fix = f"The kernel kills what uses too much memory: `dmesg` tells. {fix}"
        return ClusterLost(
            f"{watched.process.spec.name} (pid {ended.pid}) {ended} while {watched.doing} (step {watched.step})",
            fix=fix,
        )

    def _deadlines(self) -> None:
        now = time.monotonic()
        living = [w for w in self._watched.values() if w.exit is None and w.result is None]
        for watched in living:
            name = f"{watched.process.spec.name} (pid {watched.process.pid})"
            silent = now - watched.heard
            if silent > self._limits.lost_after:
                what = f"{name} has given no sign of life for {silent:.0f} s; it was {watched.doing}"
                self._fail(watched, ClusterLost(f"{what} (step {watched.step})"), secondary=False)
                return
        late = [w for w in living if now - w.since > self._limits.step_deadline]
        if late:
            # Those that wait in a collective are not the cause where somebody else has not come to it.
            culprits = (
                [w for w in late if w.doing != "all-reduce"] or [w for w in living if w.doing != "all-reduce"] or late
            )
            names = ", ".join(
                f"{w.process.spec.name} ({w.doing}, step {w.step}, for {now - w.since:.0f} s)" for w in culprits
            )
            self._fail(
                culprits[0],
                ClusterLost(
                    f"no progress for {self._limits.step_deadline:.0f} s: the others wait for {names}",
                    fix="If a step may take longer, raise `cluster.step_deadline`",
                ),
                secondary=False,
            )

    def _fail(self, watched: _Watched | None, error: VerbundError, secondary: bool, trace: str | None = None) -> None:
        name = watched.process.spec.name if watched else "supervisor"
        self._failures.append(Failure(name, time.monotonic(), error, secondary, trace))

    def _ordered(self) -> list[Failure]:
        """The first cause first: what is a consequence of another's end comes last."""
        return sorted(self._failures, key=lambda failure: (failure.secondary, failure.at))

    def _tell_all(self, kind: str) -> None:
        for watched in self._watched.values():
            if watched.exit is None:
                try:
                    watched.process.connection.send(kind)
                except WireError:
                    continue  # its exit is on the way

    def _interrupt(self) -> None:
        self._interrupts += 1


class _Signals:
    """Ctrl-C and SIGTERM call `action` while the block runs; only the main thread may do this."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action
        self._former: dict[int, Any] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._former[number] = signal.signal(number, lambda *_: self._action())

    def __exit__(self, *_: object) -> None:
        for number, former in self._former.items():
            signal.signal(number, former)
