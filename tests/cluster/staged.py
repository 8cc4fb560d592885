"""A cluster whose processes are threads of the test, each of which plays a part."""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

from verbund.cluster.process import Exit, Process, ProcessSpec
from verbund.comm.wire import Connection, WireError
from verbund.errors import ClusterLost, VerbundError


class Actor:
    """A process that is played."""

    def __init__(self, spec: ProcessSpec, pid: int, connection: Connection, exits: Callable[[Exit], None]) -> None:
        self.spec, self.pid = spec, pid
        self._connection, self._exits = connection, exits
        self._over = threading.Event()
        self._lock = threading.Lock()

    def beat(self, doing: str, step: int = 0) -> None:
        """A sign of life."""
        self._connection.send("beat", {"doing": doing, "step": step, "seconds": 0.0})

    def done(self, **result: Any) -> None:
        """It has done its work, and ends."""
        self._connection.send("done", {"result": result})
        self.end(0)

    def fail(self, error: VerbundError) -> None:
        """It has failed, and ends."""
        record = {"error": error.record(), "secondary": isinstance(error, ClusterLost)}
        self._connection.send("failed", record)
        self.end(1)

    def end(self, status: int = -9) -> None:
        """It ends; once."""
        with self._lock:
            if not self._over.is_set():
                self._over.set()
                self._connection.end()
                self._exits(Exit(self.pid, status, "acting", 7))

    def hears(self, kind: str) -> bool:
        """Waits for a message of the supervisor; False if it is killed before."""
        try:
            while not self._over.is_set():
                if self._connection.ready(0.02) and self._connection.receive(1.0).kind == kind:
                    return True
        except WireError:
            pass
        return False

    def play(self, part: Part) -> None:
        """Does what a part says, until the end; whoever is killed may be in the middle of a sentence."""
        try:
            part(self)
        except WireError:
            if not self._over.is_set():
                raise

    def killed(self) -> bool:
        """Waits until it is killed."""
        return self._over.wait(10.0)


Part = Callable[[Actor], None]


class StagedCluster:
    """Plays `parts` by role, rank and life; a part that is None does not come to life.

    Args:
        parts: what each process does.
    """

    address = None
    lost = None

    def __init__(self, parts: dict[tuple[str, int, int], Part | None]) -> None:
        self._parts = parts
        self._ended: queue.SimpleQueue[Exit] = queue.SimpleQueue()
        self._reading, self._writing = os.pipe()
        self._pid = 1_000_000
        self.actors: dict[int, Actor] = {}
        self.started: list[ProcessSpec] = []
        self.abandoned: list[str] = []
        self.slow: dict[str, threading.Event] = {}
        """By name those that do not come; set when somebody has looked for them."""

    def start(self, specs: list[ProcessSpec], timeout: float) -> list[Process]:
        self.started += specs
        for spec in specs:
            if self._parts[spec.role, spec.rank, spec.life] is None:
                raise ClusterLost(f"{spec.name} was killed by SIGKILL while starting, before it had started")
        return [self._started(spec) for spec in specs]

    def begin(self, specs: list[ProcessSpec], timeout: float) -> list[Process] | ClusterLost:
        try:
            return self.start(specs, timeout)
        except ClusterLost as error:
            return error

    def poll(self, starting: list[Process] | ClusterLost) -> list[Process] | None:
        if isinstance(starting, ClusterLost):
            raise starting
        slow = [self.slow[process.spec.name] for process in starting if process.spec.name in self.slow]
        for told in slow:
            told.set()
        return None if slow else starting

    def give_up(self, starting: list[Process] | ClusterLost) -> None:
        for process in starting if isinstance(starting, list) else []:
            self.kill(process)

    def _started(self, spec: ProcessSpec) -> Process:
        ours, theirs = socket.socketpair()
        self._pid += 1
        actor = self.actors[self._pid] = Actor(spec, self._pid, Connection(theirs), self._exit)
        part = self._parts[spec.role, spec.rank, spec.life]
        assert part is not None
        threading.Thread(target=actor.play, args=(part,), daemon=True).start()
        return Process(spec, self._pid, Connection(ours))

    def _exit(self, ended: Exit) -> None:
        self._ended.put(ended)
        os.write(self._writing, b"x")

    def fileno(self) -> int:
        return self._reading

    def exits(self) -> Iterator[Exit]:
        while not self._ended.empty():
            os.read(self._reading, 1)
            yield self._ended.get()

    def kill(self, process: Process) -> None:
        self.actors[process.pid].end(-9)

    def suspended(self, process: Process) -> bool:
        return False

    def abandon(self, processes: list[Process]) -> ClusterLost:
        self.abandoned += [process.spec.name for process in processes]
        return ClusterLost("abandoned")

    def close(self) -> None:
        os.close(self._reading)
        os.close(self._writing)
