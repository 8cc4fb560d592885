"""A cluster of several hosts: a warm server on each, which dials this machine over the network."""

from __future__ import annotations

import ipaddress
import os
import shlex
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from verbund.cluster import host as hosts_
from verbund.cluster.forked import PRELOAD
from verbund.cluster.server import Host
from verbund.cluster.spread import SpreadCluster, break_after
from verbund.cluster.started import StartedServer
from verbund.comm.rendezvous import Meeting
from verbund.errors import ClusterLost, InputError
from verbund.job import Cluster, Job


class HostsCluster(SpreadCluster):
    """Starts a warm server on each host at once; `start` forks from them.

    Args:
        job: whose `cluster` says which hosts, and how they are reached.
        scratch: a folder for what lasts no longer than the cluster.
        preload: modules that the job needs besides, to be imported once.
        environment: variables of the processes; what a host has set stays as it is.
    """

    def __init__(self, job: Job, scratch: Path, preload: Sequence[str], environment: Mapping[str, str]) -> None:
        self.hosts = [_host(name, job.cluster) for name in job.cluster.hosts]
        away = next((host for host in self.hosts if host.command), self.hosts[0])
        self.address = hosts_.source_of(away.name, away.address)
        super().__init__(job, Meeting.at(self.address, break_after(job.cluster.lost_after)), scratch)
        settings = {
            "orphan_grace": job.cluster.orphan_grace,
            "preload": [*PRELOAD, *preload],
            "folder": os.getcwd(),
        }
        try:
            for number, host in enumerate(self.hosts):
                self._servers.append(StartedServer(number, host, self.meeting, settings, environment))
        except ClusterLost:
            self.close()
            raise


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
