"""What the clusters of several hosts have in common: where workers lie, what hosts have told, what they all see."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from verbund.cluster import host as hosts_
from verbund.cluster.forked import ForkedCluster
from verbund.cluster.server import WarmServer
from verbund.comm.rendezvous import Meeting
from verbund.errors import InputError
from verbund.job import Job
from verbund.placement import place

_FACTS_SECONDS = 60.0


class SpreadCluster(ForkedCluster):
    """Warm servers on several hosts, which dial this machine over the network.

    Args:
        job: whose `cluster` says how hosts are reached and what they take.
        meeting: where they dial.
        scratch: a folder that all hosts see.
        shared: folders that they must see besides.
    """

    def __init__(self, job: Job, meeting: Meeting, scratch: Path, shared: Sequence[Path]) -> None:
        super().__init__(meeting, scratch)
        self._job = job
        self._shared = [*shared, scratch]

    def placed(self, world: int) -> list[int]:
        """The host's number for each of so many workers."""
        islands = self._job.strategy.islands
        places = place(world, islands if world % islands == 0 else 1, len(self._servers), self._job.cluster.slots)
        if places is None:
            raise InputError(f"too little room for {world} workers", where="cluster.slots")
        return places

    def free_memory(self) -> dict[str, int | None]:
        """Of each host, as it told when it was reached."""
        self._connect()
        return {server.host.name: (server.facts or {}).get("free") for server in self._servers if server.host}

    def check_shared(self, folders: Sequence[Path]) -> None:
        """Checks that all hosts see these folders.

        Raises:
            InputError: if one does not; it names the host.
        """
        self._connect()
        self._check_seen(folders, self._servers)

    def _check_seen(self, folders: Sequence[Path], servers: Sequence[WarmServer]) -> None:
        marks = {hosts_.mark(folder): folder for folder in folders}
        try:
            for server in servers:
                answer = server.ask("shared", {"marks": [str(path) for path in marks]})
                if unseen := answer.fields["missing"]:
                    folder = marks[Path(unseen[0])]
                    raise InputError(
                        f"does not see what lies in {folder} on this machine",
                        where=f"host {server.host.name if server.host else server.number}",
                        fix="Job, converted data (`data.cache`) and run must have the same paths on all hosts: a "
                        "shared file system",
                    )
        finally:
            for path in marks:
                hosts_.unmark(path)

    def _welcome(self, servers: Sequence[WarmServer] | None = None) -> None:
        """Checks what hosts tell of themselves, and what they see.

        Raises:
            InputError: if one cannot take part.
        """
        servers = self._servers if servers is None else servers
        deadline = time.monotonic() + _FACTS_SECONDS
        for server in servers:
            while server.facts is None:
                server.receive(deadline - time.monotonic(), f"{server.name} does not tell what is installed there")
            hosts_.check(server.host.name if server.host else str(server.number), server.facts)
        self._connected = True
        self._check_seen(self._shared, servers)


def break_after(lost_after: float) -> float:
    """A connection breaks a little before silence counts as loss, so that the host is named and not one of its workers.
    The kernel looks once a second, or six times, whichever is rarer."""
    return max(0.5, min(0.8 * lost_after, lost_after - 1.2))
