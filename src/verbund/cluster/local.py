"""The local cluster: processes of this machine, forked from a warm server."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from verbund.cluster.process import Exit, Process, ProcessSpec
from verbund.comm.rendezvous import Listener, Meeting
from verbund.comm.wire import Connection, Deadline, WireError
from verbund.errors import ClusterLost
from verbund.interrupts import Interrupts

# Modules whose import is what makes a start slow: they are imported once, while the job is still being checked.
PRELOAD = ("torch", "verbund.stage.preload")
_WARM_SECONDS = 120.0
_EXIT_SECONDS = 2.0


class LocalCluster:
    """Starts the warm server at once; `start` forks from it.

    Args:
        orphan_grace: seconds within which all processes have ended after this one was lost.
        preload: modules that the job needs besides, to be imported once.
        environment: variables of the processes; what the user has set stays as it is.
    """

    def __init__(
        self, orphan_grace: float = 30.0, preload: Sequence[str] = (), environment: Mapping[str, str] | None = None
    ) -> None:
        self.meeting = Meeting.create()
        self._listener = Listener(self.meeting)
        self._warm: Connection | None = None
        self._living: dict[int, Process] = {}
        self._forked: list[tuple[str, int, int]] = []
        self._groups: set[int] = set()
        self._ended: list[Exit] = []
        self._stuck: ClusterLost | None = None
        """Why the warm server is of no more use."""
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
        variables = {
            **(environment or {}),
            "GOMP_SPINCOUNT": "2000",
            **os.environ,
            "OPENBLAS_NUM_THREADS": "1",
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        }
        self._server = subprocess.Popen(
            [*command, *PRELOAD, *preload], stdin=subprocess.DEVNULL, start_new_session=True, env=variables
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
            try:
                warm.send("fork", spec.record())
            except WireError as error:
                raise self._gone(error) from None
        while len(self._forked) < len(specs):
            self._receive(max(0.0, deadline - time.monotonic()), f"{self._server_name} did not fork in time")
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

    def abandon(self, processes: list[Process]) -> ClusterLost:
        """Gives up the wait for exits that the warm server does not report, and ends it; its children end with it."""
        names = ", ".join(process.spec.name for process in processes)
        verb = "has" if len(processes) == 1 else "have"
        self._stuck = ClusterLost(f"{self._server_name} does not tell that {names} {verb} ended{self._state()}")
        self._server.kill()
        return self._stuck

    def close(self) -> None:
        """Ends all processes and the warm server; nothing is left behind."""
        with Interrupts(deferring=True):
            self._close()

    def _close(self) -> None:
        for process in self._living.values():
            process.connection.close()
        if self._warm is not None and self._stuck is None:
            try:
                self._warm.send("leave")
            except WireError:
                pass
        else:
            self._server.kill()
        if self._warm is not None:
            self._warm.close()
        try:
            self._server.wait(10.0)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        if self._server.returncode != 0:
            for pid in self._groups:  # what workers left behind has lost its last parent
                self._kill_group(pid)
        self._listener.close()
        self.meeting.remove()

    def _kill_group(self, pid: int) -> None:
        try:
            os.killpg(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return

    def _connect(self) -> Connection:
        deadline = time.monotonic() + _WARM_SECONDS
        while self._warm is None:
            if (status := self._server.poll()) is not None:
                raise ClusterLost(
                    f"{self._server_name} {Exit(self._server.pid, status)} before it had started",
                    fix="`verbund doctor` checks the installation",
                )
            if time.monotonic() > deadline:
                state = self._state()
                raise ClusterLost(f"{self._server_name} did not start within {_WARM_SECONDS:.0f} s{state}")
            if _readable(self._listener, 0.05) and (accepted := self._listener.accept()):
                connection, role, _ = accepted
                if role == "warm":
                    self._warm = connection
                else:
                    connection.close()
        return self._warm

    @property
    def _server_name(self) -> str:
        return f"the warm server (pid {self._server.pid})"

    def _state(self) -> str:
        """What keeps the warm server, as far as the kernel tells: the rest of a sentence."""
        try:
            stat = Path(f"/proc/{self._server.pid}/stat").read_text(encoding="ascii", errors="replace")
        except OSError:
            return ""
        return ": it is stopped (SIGSTOP)" if stat.rpartition(")")[2].split()[0] in ("T", "t") else ""

    def _gone(self, error: WireError) -> ClusterLost:
        """The warm server's connection broke: the reason is how it ended."""
        if self._stuck is None:
            self._stuck = ClusterLost(f"{self._server_name}, the parent of all workers, is lost: {error}")
            try:
                ended = Exit(self._server.pid, self._server.wait(_EXIT_SECONDS))
                self._stuck = ClusterLost(f"{self._server_name}, the parent of all workers, {ended}")
            except subprocess.TimeoutExpired:
                self._server.kill()
        return self._stuck

    def _drain(self) -> None:
        while self._connect().ready():
            self._receive(5.0, f"{self._server_name} sent half a message")

    def _receive(self, timeout: float, otherwise: str) -> None:
        try:
            message = self._connect().receive(max(timeout, 1e-3))
        except Deadline:
            self._stuck = ClusterLost(f"{otherwise}{self._state()}")
            raise self._stuck from None
        except WireError as error:
            raise self._gone(error) from None
        if message.kind == "forked":
            self._groups.add(message.fields["pid"])
            self._forked.append((message.fields["role"], message.fields["rank"], message.fields["pid"]))
        elif message.kind == "exit":
            self._ended.append(Exit(**message.fields))


def _readable(listener: Listener, timeout: float) -> bool:
    return bool(select.select([listener], [], [], timeout)[0])
