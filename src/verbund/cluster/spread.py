"""What the clusters of several hosts have in common: where workers lie, what hosts have told, what they all see."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from verbund.cluster import host as hosts_
from verbund.cluster.file_service import FileService
from verbund.cluster.forked import ForkedCluster
from verbund.cluster.server import WarmServer
from verbund.cluster.supplies import Supplies, Tree
from verbund.comm.files import ROLE
from verbund.comm.rendezvous import Meeting
from verbund.comm.wire import Connection
from verbund.errors import ClusterLost, InputError
from verbund.job import Job
from verbund.placement import place

_FACTS_SECONDS = 60.0
_STILL_SECONDS = 60.0
"""How long nothing may come on the way to a host."""
_TURN = 0.05


class SpreadCluster(ForkedCluster):
    """Warm servers on several hosts, which dial this machine over the network.

    Args:
        job: whose `cluster` says how hosts are reached and what they take.
        meeting: where they dial.
        scratch: a folder for what lasts no longer than the cluster.
    """

    def __init__(self, job: Job, meeting: Meeting, scratch: Path) -> None:
        super().__init__(meeting, scratch)
        self._job = job
        self._files = FileService()
        self._shared: list[Path] = []
        self._supplies: Supplies | None = None

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

    @property
    def apart(self) -> list[str]:
        """The hosts that do not see all folders that were shared."""
        return [server.host.name for server in self._servers if server.unseen and server.host]

    def share(self, folders: Sequence[Path]) -> None:
        """Lets processes on all hosts use these folders, whether hosts see them or not."""
        self._connect()
        for folder in map(Path.resolve, folders):
            self._files.open(folder)
            if folder not in self._shared:
                self._shared.append(folder)
        self._look(self._servers)

    def supply(self, supplies: Supplies) -> None:
        """Sees to it that processes on all hosts find these files; waits until that is so.

        Raises:
            InputError: if a host has no room for them, or cannot write them.
            ClusterLost: if a host is lost meanwhile, or nothing more comes there.
        """
        self._connect()
        self._supplies = supplies
        self._await_supply(self._servers)

    def close(self) -> None:
        self._files.close()
        super().close()

    def _look(self, servers: Sequence[WarmServer]) -> None:
        """Finds out which of the shared folders hosts do not see."""
        for server, unseen in zip(servers, self._unseen(self._shared, servers), strict=True):
            server.unseen = [str(folder) for folder in unseen]

    @staticmethod
    def _unseen(folders: Sequence[Path], servers: Sequence[WarmServer]) -> list[list[Path]]:
        """Of each server which of these folders its host does not see: a new file proves it."""
        marks = {str(hosts_.mark(folder)): folder for folder in folders}
        try:
            return [
                [marks[path] for path in server.ask("shared", {"marks": [*marks]}).fields["missing"]]
                for server in servers
            ]
        finally:
            for path in marks:
                hosts_.unmark(Path(path))

    def _begin_supply(self, server: WarmServer) -> None:
        """Asks a host to get what it does not see, unless that has been done."""
        supplies = self._supplies
        if supplies is None or server.supply.asked == supplies:
            return
        trees = {tree.folder: tree for tree in supplies.trees}
        (unseen,) = self._unseen([*trees], [server])
        unseen = [folder for folder in unseen if not self._same(server, trees[folder])]
        if unseen:
            for sha256, content in supplies.offered():
                self._files.offer(sha256, content)
        server.supply.begin(supplies, [trees[folder] for folder in unseen], lambda told: server.send("supply", told))

    @staticmethod
    def _same(server: WarmServer, tree: Tree) -> bool:
        """Whether a host has a data set at the same path, though nobody may write there to prove it."""
        outline = tree.outline()
        return outline is not None and bool(server.ask("same", outline).fields["same"])

    def _await_supply(self, servers: Sequence[WarmServer]) -> None:
        """Waits until hosts have what they need, as long as something comes."""
        if self._supplies is None:
            return
        for server in servers:
            self._begin_supply(server)
        while waiting := [server for server in servers if server.supply.places is None]:
            self._hear()
            for server in waiting:
                server.drain()
                if server.lost is not None:
                    raise server.lost
                self._check_supply(server)
            self._tell_supply(waiting)
            self._epoll.poll(_TURN)

    def _tell_supply(self, waiting: Sequence[WarmServer]) -> None:
        """Tells the user, now and then, how far hosts are that are still waited for."""

    def _check_supply(self, server: WarmServer) -> None:
        """Raises why a host cannot get what it needs, if so."""
        where = f"host {server.host.name if server.host else server.number}"
        if (error := server.supply.failed) is not None:
            error.where = f"{where}, {error.where}" if error.where else where
            raise error
        if server.supply.places is None and time.monotonic() - server.supply.moved > _STILL_SECONDS:
            what = f"no more of task and data came within {_STILL_SECONDS:.0f} s, after {server.supply.bytes} bytes"
            raise ClusterLost(what, where=where)

    def _unexpected(self, connection: Connection, role: str, number: int) -> None:
        if role == ROLE:
            self._files.serve(connection)
        else:
            connection.close()

    def _welcome(self, servers: Sequence[WarmServer] | None = None) -> None:
        """Checks what hosts tell of themselves, finds out what they see, and supplies them with the rest.

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
        if self._shared:
            self._look(servers)
        self._await_supply(servers)


def break_after(lost_after: float) -> float:
    """A connection breaks a little before silence counts as loss, so that the host is named and not one of its workers.
    The kernel looks once a second, or six times, whichever is rarer."""
    return max(0.5, min(0.8 * lost_after, lost_after - 1.2))
