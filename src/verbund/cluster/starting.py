"""Processes that were asked of warm servers, until each has said hello. Nobody waits for them but who wants to."""

from __future__ import annotations

import time
from collections.abc import Sequence

from verbund.cluster.process import Exit, Process, ProcessSpec
from verbund.cluster.server import WarmServer
from verbund.comm.wire import Connection
from verbund.errors import ClusterLost

Key = tuple[str, int]
"""Role and rank."""


class Starting:
    """Processes of one request: all start, or none.

    Args:
        specs: what they are.
        servers: each one's.
        timeout: seconds that it may take.
    """

    def __init__(self, specs: Sequence[ProcessSpec], servers: Sequence[WarmServer], timeout: float) -> None:
        self._specs, self._timeout = specs, timeout
        self._servers = {(spec.role, spec.rank): server for spec, server in zip(specs, servers, strict=True)}
        self._deadline = time.monotonic() + timeout
        self._pids: dict[Key, int] = {}
        self._connections: dict[Key, Connection] = {}
        self._exits: list[tuple[WarmServer, Exit]] = []

    def forked(self, server: WarmServer, role: str, rank: int, pid: int) -> bool:
        """A server tells that it has forked a process; whether it is one of these."""
        key = role, rank
        expected = self._servers.get(key) is server and key not in self._pids
        if expected:
            self._pids[key] = pid
        return expected

    def greeted(self, role: str, rank: int, connection: Connection) -> bool:
        """A process has said hello, perhaps before its server has told of it; whether it is one of these."""
        key = role, rank
        expected = key in self._servers and key not in self._connections
        if expected:
            self._connections[key] = connection
        return expected

    def ended(self, server: WarmServer, one: Exit) -> bool:
        """A process has ended; whether it is one of these."""
        expected = any(self._servers[key] is server and pid == one.pid for key, pid in self._pids.items())
        if expected:
            self._exits.append((server, one))
        return expected

    def processes(self) -> list[Process] | None:
        """All of them, in the order of the specs; None as long as one is missing. They are their servers' from now on,
        which tell of those that have ended meanwhile as of any others."""
        keys = [(spec.role, spec.rank) for spec in self._specs]
        if not all(key in self._pids and key in self._connections for key in keys):
            return None
        found = []
        for key, spec in zip(keys, self._specs, strict=True):
            server, pid = self._servers[key], self._pids[key]
            process = server.living[pid] = Process(spec, pid, self._connections[key], server.number)
            found.append(process)
        for server, one in self._exits:
            server.ended.append(one)
        return found

    def check(self) -> None:
        """Whether they may still all come. A server that has not forked in time is of no more use.

        Raises:
            ClusterLost: if not.
        """
        for server in self._servers.values():
            if server.lost is not None:
                raise server.lost
        missing = [key for key in self._servers if key not in self._connections]
        dead = [(key, one) for key in missing for _, one in self._exits if self._pids.get(key) == one.pid]
        if dead:
            how = "; ".join(f"{role} {rank} {one} while {one.doing}" for (role, rank), one in dead)
            raise ClusterLost(f"{how}, before it had started")
        if time.monotonic() > self._deadline:
            for key, server in self._servers.items():
                if key not in self._pids:
                    raise server.stuck("did not fork in time")
            late = ", ".join(f"{role} {rank}" for role, rank in missing)
            raise ClusterLost(f"not started within {self._timeout:.0f} s: {late}")

    def end(self) -> None:
        """Ends those that there are."""
        for connection in self._connections.values():
            connection.close()
        for key, pid in self._pids.items():
            self._servers[key].kill_forked(pid)
