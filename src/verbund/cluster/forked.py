"""Clusters whose processes are forked from warm servers, one on each host."""

from __future__ import annotations

import select
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from verbund.cluster.process import Exit, Process, ProcessSpec
from verbund.cluster.server import WarmServer
from verbund.cluster.supplies import Supplies
from verbund.comm.rendezvous import Listener, Meeting
from verbund.comm.wire import Connection, WireError
from verbund.errors import ClusterLost
from verbund.interrupts import Interrupts
from verbund.job import Job

# Modules whose import is what makes a start slow: they are imported once, while the job is still being checked.
PRELOAD = ("torch", "verbund.stage.preload")
WARM_SECONDS = 120.0


class ForkedCluster:
    """What the clusters of one and of several hosts have in common.

    Args:
        meeting: where its processes meet.
        scratch: a folder that all of them see.
    """

    def __init__(self, meeting: Meeting, scratch: Path) -> None:
        self._listener = Listener(meeting)
        self.meeting = self._listener.meeting
        self.scratch = scratch
        self._servers: list[WarmServer] = []
        self._epoll = select.epoll()
        self._heard: set[WarmServer] = set()
        """The servers whose descriptors the epoll has."""
        self._connected = False

    @property
    def lost(self) -> ClusterLost | None:
        """Why no process can be started any more: a warm server is gone."""
        return next((server.lost for server in self._servers if server.lost is not None), None)

    def placed(self, world: int) -> list[int]:
        """The host's number for each of so many workers."""
        return [0] * world

    def settled(self, job: Job) -> Job:
        """The job as it stands: its hosts are known."""
        return job

    @property
    def apart(self) -> list[str]:
        """None on one machine."""
        return []

    def share(self, folders: Sequence[Path]) -> None:
        """Nothing to do on one machine."""

    def supply(self, supplies: Supplies) -> None:
        """Nothing to do on one machine."""

    def start(self, specs: list[ProcessSpec], timeout: float = 60.0) -> list[Process]:
        """Forks a process per spec and waits until each has said hello; if one does not, none is left.

        Raises:
            ClusterLost: if a warm server or a process ends before, or `timeout` seconds pass.
            InputError: if a host cannot take part.
        """
        self._connect()
        deadline = time.monotonic() + timeout
        # All say where they must run, or none does.
        places = [spec.host for spec in specs if spec.host is not None] or self.placed(len(specs))
        roles = [spec.role for spec in specs]
        specs = [self._on_host(spec, places, roles, number) for number, spec in enumerate(specs)]
        pids = self._forked(specs, places, deadline)
        try:
            return self._greeted(specs, pids, deadline, timeout)
        except ClusterLost:
            for host, pid in pids.values():
                self._servers[host].kill_forked(pid)
            raise

    def _greeted(
        self, specs: list[ProcessSpec], pids: dict[tuple[str, int], tuple[int, int]], deadline: float, timeout: float
    ) -> list[Process]:
        """The forked processes, once each has said hello."""
        processes: dict[tuple[str, int], Process] = {}
        waiting = {(spec.role, spec.rank): spec for spec in specs}
        while waiting:
            if time.monotonic() > deadline:
                late = ", ".join(spec.name for spec in waiting.values())
                raise ClusterLost(f"not started within {timeout:.0f} s: {late}")
            self._drain()
            if not readable(self._listener, 0.05):
                self._check_living(waiting, pids)
                continue
            accepted = self._accepted()
            if accepted is None:
                continue
            connection, role, rank = accepted
            if (spec_ := waiting.pop((role, rank), None)) is None:
                self._unexpected(connection, role, rank)
                continue
            host, pid = pids[role, rank]
            process = Process(spec_, pid, connection, host)
            processes[role, rank] = self._servers[host].living[pid] = process
        return [processes[spec.role, spec.rank] for spec in specs]

    def fileno(self) -> int:
        self._connect()
        return self._epoll.fileno()

    def exits(self) -> Iterator[Exit]:
        self._connect()
        for server in self._servers:
            yield from server.exits()
            self._unhear(server)

    def kill(self, process: Process) -> None:
        self._servers[process.host].kill(process)

    def replaced(self, host: int) -> bool:
        """No other machine takes the place of a lost one."""
        return False

    def suspended(self, process: Process) -> bool:
        return self._servers[process.host].suspended(process)

    def abandon(self, processes: list[Process]) -> ClusterLost:
        """Gives up the wait for exits that warm servers do not report, and ends those; their children end with them."""
        errors = []
        for server in self._servers:
            if names := [process.spec.name for process in processes if process.host == server.number]:
                errors.append(server.abandon(names))
                self._unhear(server)
        return errors[0]

    def close(self) -> None:
        """Ends all processes and the warm servers; nothing is left behind."""
        with Interrupts(deferring=True):
            for server in self._servers:
                server.leave()
            for server in self._servers:
                server.wait()
            self._epoll.close()
            self._listener.close()
            self.meeting.remove()

    def _connect(self) -> None:
        """Waits until all warm servers are there."""
        deadline = time.monotonic() + WARM_SECONDS
        while not self._connected:
            missing = [server for server in self._servers if server.connection is None]
            if not missing:
                self._welcome()
                self._connected = True
                return
            for server in missing:
                server.check_running()
            if time.monotonic() > deadline:
                raise missing[0].late(WARM_SECONDS)
            if readable(self._listener, 0.05) and (accepted := self._accepted()):
                connection, role, number = accepted
                if role == "warm" and any(server.number == number for server in missing):
                    self._servers[number].connection = connection
                    self._epoll.register(connection, select.EPOLLIN)
                    self._heard.add(self._servers[number])
                else:
                    self._unexpected(connection, role, number)

    def _unexpected(self, connection: Connection, role: str, number: int) -> None:
        """Somebody who knows the secret, and whom nobody waits for."""
        connection.close()

    def _welcome(self) -> None:
        """All warm servers are connected; nothing has been asked of them yet."""

    def _accepted(self) -> tuple[Connection, str, int] | None:
        try:
            return self._listener.accept()
        except WireError:
            return None

    def _on_host(self, spec: ProcessSpec, places: list[int], roles: list[str], number: int) -> ProcessSpec:
        host = self._servers[places[number]].host
        spec = replace(spec, address=host.address if host else None)
        if spec.neighbours:
            return spec
        alike = list(zip(places, roles, strict=True))
        return replace(
            spec,
            place=alike[:number].count(alike[number]),
            neighbours=alike.count(alike[number]),
            residents=places.count(places[number]),
        )

    def _forked(
        self, specs: list[ProcessSpec], places: list[int], deadline: float
    ) -> dict[tuple[str, int], tuple[int, int]]:
        """Host and pid of each process, by role and rank."""
        for server in self._servers:
            server.forked.clear()
        for spec, place in zip(specs, places, strict=True):
            self._servers[place].fork(spec)
        pids: dict[tuple[str, int], tuple[int, int]] = {}
        for server in self._servers:
            while len(server.forked) < places.count(server.number):
                server.receive(max(0.0, deadline - time.monotonic()), f"{server.name} did not fork in time")
            pids |= {(role, rank): (server.number, pid) for role, rank, pid in server.forked}
        return pids

    def _check_living(
        self, waiting: dict[tuple[str, int], ProcessSpec], pids: dict[tuple[str, int], tuple[int, int]]
    ) -> None:
        for server in self._servers:
            if server.lost is not None:
                raise server.lost
        ended = {(exit_.host, exit_.pid): exit_ for server in self._servers for exit_ in server.ended}
        if dead := [(spec.name, ended[pids[key]]) for key, spec in waiting.items() if pids[key] in ended]:
            how = "; ".join(f"{name} {exit_} while {exit_.doing}" for name, exit_ in dead)
            raise ClusterLost(f"{how}, before it had started")

    def _drain(self) -> None:
        for server in self._servers:
            server.drain()
            self._unhear(server)

    def _unhear(self, server: WarmServer) -> None:
        if server.lost is not None and server in self._heard and server.connection is not None:
            self._heard.remove(server)
            self._epoll.unregister(server.connection)


def readable(listener: Listener, timeout: float) -> bool:
    """Whether somebody waits to be accepted, within so many seconds."""
    return bool(select.select([listener], [], [], timeout)[0])
