"""The local cluster: processes of this machine, forked from a warm server."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

from verbund.cluster.process import Exit, Process, ProcessSpec
from verbund.comm.rendezvous import Listener, Meeting
from verbund.comm.wire import Connection, WireError
from verbund.errors import ClusterLost

# Modules whose import is what makes a start slow: they are imported once, while the job is still being checked.
PRELOAD = ("torch", "verbund.stage.preload")
_WARM_SECONDS = 120.0


class LocalCluster:
    """Starts the warm server at once; `start` forks from it.

    Args:
        orphan_grace: seconds within which all processes have ended after this one was lost.
        preload: modules that the job needs besides, to be imported once.
    """

    def __init__(self, orphan_grace: float = 30.0, preload: Sequence[str] = ()) -> None:
        self.meeting = Meeting.create()
        self._listener = Listener(self.meeting)
        self._warm: Connection | None = None
        self._living: dict[int, Process] = {}
        self._forked: list[tuple[str, int, int]] = []
        self._ended: list[Exit] = []
        command = [
            sys.executable,
            "-P",
            "-m",
            "verbund.cluster.warm",
            str(self.meeting.folder),
            str(orphan_grace),
        ]
        # numpy's BLAS would start a thread per core when it is imported, and a server with threads cannot be forked.
        # OpenMP's threads spin while they wait, which brings work to a halt as soon as somebody else needs a core.
        environment = {
            "GOMP_SPINCOUNT": "2000",
            **os.environ,
            "OPENBLAS_NUM_THREADS": "1",
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        }
        self._server = subprocess.Popen(
            [*command, *PRELOAD, *preload], stdin=subprocess.DEVNULL, start_new_session=True, env=environment
        )

    def start(self, specs: list[ProcessSpec], timeout: float = 60.0) -> list[Process]:
        """Forks a process per spec and waits until each has said hello.

        Raises:
            ClusterLost: if the warm server or a process ends before, or `timeout` seconds pass.
        """
        warm = self._connect()
        deadline = time.monotonic() + timeout
        self._forked.clear()
        for spec in specs:
            warm.send("fork", spec.record())
        while len(self._forked) < len(specs):
            self._receive(max(0.0, deadline - time.monotonic()), "the warm server did not fork in time")
        pids = {(role, rank): pid for role, rank, pid in self._forked}
        processes: dict[tuple[str, int], Process] = {}
        waiting = {(spec.role, spec.rank): spec for spec in specs}
        while waiting:
            if time.monotonic() > deadline:
                late = ", ".join(spec.name for spec in waiting.values())
                raise ClusterLost(f"not started within {timeout:.0f} s: {late}")
            self._drain()
            if not _readable(self._listener, 0.05):
                dead = [spec.name for key, spec in waiting.items() if pids[key] in {e.pid for e in self._ended}]
                if dead:
                    raise ClusterLost(f"{', '.join(dead)} ended before it had started")
                continue
            accepted = self._listener.accept()
            if accepted is None:
                continue
            connection, role, rank = accepted
            if (spec_ := waiting.pop((role, rank), None)) is None:
                connection.close()
                continue
            processes[role, rank] = self._living[pids[role, rank]] = Process(spec_, pids[role, rank], connection)
        return [processes[spec.role, spec.rank] for spec in specs]

    def fileno(self) -> int:
        return self._connect().fileno()

    def exits(self) -> Iterator[Exit]:
        self._drain()
        while self._ended:
            ended = self._ended.pop(0)
            self._living.pop(ended.pid, None)
            yield ended

    def kill(self, process: Process) -> None:
        if process.pid in self._living:
            try:
                os.kill(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                self._living.pop(process.pid, None)

    def close(self) -> None:
        """Ends all processes and the warm server; nothing is left behind."""
        for process in self._living.values():
            process.connection.close()
        if self._warm is not None:
            try:
                self._warm.send("leave")
            except WireError:
                pass
            self._warm.close()
        else:
            self._server.kill()
        try:
            self._server.wait(10.0)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        self._listener.close()
        self.meeting.remove()

    def _connect(self) -> Connection:
        deadline = time.monotonic() + _WARM_SECONDS
        while self._warm is None:
            if (status := self._server.poll()) is not None:
                raise ClusterLost(
                    f"the warm server ended with status {status} before it had started",
                    fix="`verbund doctor` checks the installation",
                )
            if time.monotonic() > deadline:
                raise ClusterLost(f"the warm server did not start within {_WARM_SECONDS:.0f} s")
            if _readable(self._listener, 0.05) and (accepted := self._listener.accept()):
                connection, role, _ = accepted
                if role == "warm":
                    self._warm = connection
                else:
                    connection.close()
        return self._warm

    def _drain(self) -> None:
        while self._connect().ready():
            self._receive(5.0, "the warm server sent half a message")

    def _receive(self, timeout: float, otherwise: str) -> None:
        try:
            message = self._connect().receive(max(timeout, 1e-3))
        except WireError as error:
            status = self._server.poll()
            how = f"; it {Exit(self._server.pid, status)}" if status is not None else ""
            raise ClusterLost(f"{otherwise}: {error}{how}") from None
        if message.kind == "forked":
            self._forked.append((message.fields["role"], message.fields["rank"], message.fields["pid"]))
        elif message.kind == "exit":
            self._ended.append(Exit(message.fields["pid"], message.fields["status"]))


def _readable(listener: Listener, timeout: float) -> bool:
    return bool(select.select([listener], [], [], timeout)[0])
