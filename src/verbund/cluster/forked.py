"""Clusters whose processes are forked from warm servers, one on each host."""

from __future__ import annotations

import select
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from verbund.cluster.process import Exit, Process, ProcessSpec
from verbund.cluster.server import WarmServer
from verbund.cluster.starting import Starting
from verbund.cluster.supplies import Supplies
from verbund.comm.rendezvous import Listener, Meeting
from verbund.comm.wire import Connection, WireError
from verbund.errors import ClusterLost
from verbund.interrupts import Interrupts
from verbund.job import Job

# Modules whose import is what makes a start slow: they are imported once, while the job is still being checked.
PRELOAD = ("torch", "verbund.stage.preload")
WARM_SECONDS = 120.0
_TURN = 0.05


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
        self._epoll.register(self._listener, select.EPOLLIN)
        self._starting: list[Starting] = []
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
        starting = self.begin(specs, timeout)
        while (processes := self.poll(starting)) is None:
            heard = [server.connection.fileno() for server in self._heard if server.connection is not None]
            select.select([self._listener.fileno(), *heard], [], [], _TURN)
        return processes

    def begin(self, specs: list[ProcessSpec], timeout: float) -> Starting:
        """Asks for a process per spec; `poll` tells when they are there.

        Raises: as `start`.
        """
        self._connect()
        # All say where they must run, or none does.
        places = [spec.host for spec in specs if spec.host is not None] or self.placed(len(specs))
        roles = [spec.role for spec in specs]
        specs = [self._on_host(spec, places, roles, number) for number, spec in enumerate(specs)]
        starting = Starting(specs, [self._servers[place] for place in places], timeout)
        for spec, place in zip(specs, places, strict=True):
            self._servers[place].fork(spec)
        self._starting.append(starting)
        return starting

    def poll(self, starting: Starting) -> list[Process] | None:
        """The processes, once each has said hello; None: not yet. Waits for nobody.

        Raises:
            ClusterLost: if they cannot all come any more; then none is left.
        """
        self._hear()
        if (processes := starting.processes()) is None:
            try:
                starting.check()
            except ClusterLost:
                self.give_up(starting)
                raise
            return None
        self._starting.remove(starting)
        return processes

    def give_up(self, starting: Starting) -> None:
        """Ends what was begun and is not wanted any more."""
        self._starting.remove(starting)
        starting.end()

    def fileno(self) -> int:
        self._connect()
        return self._epoll.fileno()

    def exits(self) -> Iterator[Exit]:
        self._connect()
        self._hear()
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
            if readable(self._listener, _TURN) and (accepted := self._accepted()):
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

    def _hear(self) -> None:
        """Lets in who has come, reads what warm servers have told, and gives it to those who wait for it."""
        while readable(self._listener, 0.0) and (accepted := self._accepted()):
            self._arrived(*accepted)
        for server in self._servers:
            server.drain()
            self._unhear(server)
            forked, server.forked = server.forked, []
            for role, rank, pid in forked:
                if not any(starting.forked(server, role, rank, pid) for starting in self._starting):
                    server.kill_forked(pid)  # nobody wants it any more
            server.ended = [one for one in server.ended if not any(each.ended(server, one) for each in self._starting)]

    def _arrived(self, connection: Connection, role: str, number: int) -> None:
        if not any(starting.greeted(role, number, connection) for starting in self._starting):
            self._unexpected(connection, role, number)

    def _unhear(self, server: WarmServer) -> None:
        if server.lost is not None and server in self._heard and server.connection is not None:
            self._heard.remove(server)
            self._epoll.unregister(server.connection)


def readable(listener: Listener, timeout: float) -> bool:
    """Whether somebody waits to be accepted, within so many seconds."""
    return bool(select.select([listener], [], [], timeout)[0])
