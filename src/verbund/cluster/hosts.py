"""A cluster of several hosts: a warm server on each, which dials this machine over the network."""

from __future__ import annotations

import ipaddress
import os
import shlex
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from verbund.cluster import host as hosts_
from verbund.cluster.forked import PRELOAD, ForkedCluster
from verbund.cluster.server import Host, WarmServer
from verbund.comm.rendezvous import Meeting
from verbund.errors import ClusterLost, InputError
from verbund.job import Cluster, Job
from verbund.placement import place

_FACTS_SECONDS = 60.0


class HostsCluster(ForkedCluster):
    """Starts a warm server on each host at once; `start` forks from them.

    Args:
        job: whose `cluster` says which hosts, and how they are reached.
        scratch: a folder that all hosts see.
        shared: folders that they must see besides.
        preload: modules that the job needs besides, to be imported once.
        environment: variables of the processes; what a host has set stays as it is.
    """

    def __init__(
        self, job: Job, scratch: Path, shared: Sequence[Path], preload: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self._job = job
        self._shared = [*shared, scratch]
        self.hosts = [_host(name, job.cluster) for name in job.cluster.hosts]
        away = next((host for host in self.hosts if host.command), self.hosts[0])
        self.address = hosts_.source_of(away.name, away.address)
        super().__init__(Meeting.at(self.address, _break_after(job.cluster.lost_after)), scratch)
        settings = {
            "orphan_grace": job.cluster.orphan_grace,
            "preload": [*PRELOAD, *preload],
            "folder": os.getcwd(),
        }
        try:
            for number, host in enumerate(self.hosts):
                self._servers.append(WarmServer(number, host, self.meeting, settings, environment))
        except ClusterLost:
            self.close()
            raise

    def placed(self, world: int) -> list[int]:
        """The host's number for each of so many workers."""
        islands = self._job.strategy.islands
        places = place(world, islands if world % islands == 0 else 1, len(self.hosts), self._job.cluster.slots)
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
        marks = {hosts_.mark(folder): folder for folder in folders}
        try:
            for server in self._servers:
                answer = server.ask("shared", {"marks": [str(path) for path in marks]})
                if unseen := answer.fields["missing"]:
                    folder = marks[Path(unseen[0])]
                    raise InputError(
                        f"does not see what lies in {folder} on this machine",
                        where=f"host {self.hosts[server.number].name}",
                        fix="Job, converted data (`data.cache`) and run must have the same paths on all hosts: a "
                        "shared file system",
                    )
        finally:
            for path in marks:
                hosts_.unmark(path)

    def _welcome(self) -> None:
        deadline = time.monotonic() + _FACTS_SECONDS
        for server in self._servers:
            while server.facts is None:
                server.receive(deadline - time.monotonic(), f"{server.name} does not tell what is installed there")
            hosts_.check(self.hosts[server.number].name, server.facts)
        self._connected = True
        self.check_shared(self._shared)


def _break_after(lost_after: float) -> float:
    """A connection breaks a little before silence counts as loss, so that the host is named and not one of its workers.
    The kernel looks once a second, or six times, whichever is rarer."""
    return max(0.5, min(0.8 * lost_after, lost_after - 1.2))


def _host(name: str, settings: Cluster) -> Host:
    """The host that a job names.

    Raises:
        InputError: if it is not known, or lies outside of the trusted network.
    """
    try:
        address = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        fix = "Give its address, or a name that this machine can resolve"
        raise InputError(f"the host `{name}` is not known: {why}", where="cluster.hosts", fix=fix) from None
    if settings.trusted_network is not None:
        network = ipaddress.ip_network(settings.trusted_network)
        if ipaddress.ip_address(address) not in network:
            raise InputError(
                f"the host `{name}` has the address {address}, which does not lie in `trusted_network` {network}",
                where="cluster.hosts",
                fix="Give its address in that network, or the network in which it lies if that is yours alone",
            )
    command = () if hosts_.is_own(address) else tuple(w.format(host=name) for w in shlex.split(settings.command))
    return Host(name, address, command)
