"""A cluster of machines that are started from outside: each runs `verbund join`, and offers slots for workers.

Who joins beyond what the job needs waits, and takes the place of a host that is lost.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from verbund.cluster import host as hosts_
from verbund.cluster.forked import PRELOAD
from verbund.cluster.invitation import Invitation
from verbund.cluster.joined import JoinedServer, judge
from verbund.cluster.server import WarmServer
from verbund.cluster.spread import SpreadCluster, break_after
from verbund.comm.rendezvous import Meeting
from verbund.comm.wire import Connection
from verbund.errors import ClusterLost, InputError, VerbundError
from verbund.job import Job
from verbund.placement import place

Tell = Callable[[str], None]
"""Tells the user something."""

_TURN = 0.05
_MOST_JOINERS = 4096
_TELL_SECONDS = 5.0


class ExternalCluster(SpreadCluster):
    """Listens at once; machines may join whenever they like.

    Args:
        job: whose `cluster` says where, and who may join.
        scratch: a folder for what lasts no longer than the cluster.
        preload: modules that the job needs besides, to be imported once.
        environment: variables of the processes; what a host has set stays as it is.
        tell: tells the user how to join.
    """

    def __init__(
        self,
        job: Job,
        scratch: Path,
        preload: Sequence[str],
        environment: Mapping[str, str],
        tell: Tell,
    ) -> None:
        self.invitation = invitation = Invitation.of(job, scratch)
        silence = break_after(job.cluster.lost_after)
        super().__init__(job, Meeting.at(invitation.host, silence, invitation.port, invitation.secret), scratch)
        self._tell = tell
        self._asked = {
            "orphan_grace": job.cluster.orphan_grace,
            "preload": [*PRELOAD, *preload],
            "folder": os.getcwd(),
            "environment": dict(environment),
            "lost_after": silence,
        }
        self._joined: dict[int, JoinedServer] = {}
        """All who have come and are not lost, by token."""
        self._tokens = 0
        self._polled: dict[int, JoinedServer] = {}
        """By the descriptors of their connections."""
        self._turned_away: list[str] = []
        self._stuck: ClusterLost | None = None
        self._tells = 0.0
        """When the user is told again how far hosts are."""
        try:
            self.joins_at = invitation.publish(int(self.meeting.address.rpartition(":")[2]))
        except InputError:
            self.close()
            raise

    @property
    def address(self) -> str | None:
        """This machine's, on the way to the first host."""
        first = next((server.host for server in self._servers if server.host), None)
        return hosts_.source_of(first.name, first.address) if first else None

    @property
    def lost(self) -> ClusterLost | None:
        """Why no process can be started any more: nobody takes a lost host's place."""
        return self._stuck

    def settled(self, job: Job) -> Job:
        self._job = job
        if any(server.lost is not None for server in self._servers) or self._members() != self._servers:
            self._connected = False
        self._connect()
        self._job = self._on_members()
        return self._job

    def _on_members(self) -> Job:
        """The job on the hosts that there are: even shares where all of them have the slots."""
        job = self._job
        hosts, slots = [server.host for server in self._servers], self._slots(self._servers)
        even = place(job.world, job.strategy.islands, len(hosts), None) or []
        shares = [even.count(number) for number in range(len(hosts))]
        if all(0 < share <= room for share, room in zip(shares, slots, strict=True)):
            slots = shares
        changes = {"cluster.hosts": [host.name for host in hosts if host], "cluster.slots": slots}
        return Job.build(job.resolved(), changes, source="job.toml", folder=Path(job.folder))

    def replaced(self, host: int) -> bool:
        lost = self._servers[host]
        if lost.lost is None:
            return True  # it has been replaced before
        needed = self._job.cluster.slots
        slots = needed[host] if isinstance(needed, list) else 1
        for one in sorted(self._joined.values(), key=_order):
            if one not in self._servers and one.supplied and one.offer and one.offer.slots >= slots:
                try:
                    self._welcome([one])
                    if self._job.strategy.exchange.served and one.unseen:
                        raise InputError("does not see the run's folder", where=f"host {one.offer.address}")
                except VerbundError as error:
                    self._turned_away.append(str(error))
                    one.lost = one.lost or ClusterLost(str(error))
                    self._forget(one)
                    continue
                one.number, self._servers[host] = host, one
                lost.leave()
                return True
        return False

    def close(self) -> None:
        self.invitation.withdraw()
        self._servers = [*self._servers, *(one for one in self._joined.values() if one not in self._servers)]
        super().close()

    # -- who is there --------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        """Waits until machines with as many slots as the job needs have joined."""
        if self._connected:
            return
        limit = self._job.cluster.join_within
        deadline, told = time.monotonic() + limit, False
        former = next((server.lost for server in self._servers if server.lost is not None), None)
        while True:
            self._check()
            self._hear()
            members = self._members()
            if members and all(member.ready for member in members):
                break
            if time.monotonic() > deadline:
                self._stuck = self._missing(limit, former, members)
                raise self._stuck
            if not told and not members:
                told = True
                self._tell(self._invite())
            self._epoll.poll(_TURN)
        for old in self._servers:
            if old.lost is not None:
                old.leave()
        self._servers = [*members]
        for number, member in enumerate(members):
            member.number = number
        self._welcome()

    def _check(self) -> None:
        """Raises ClusterLost if nobody will come any more."""

    def _members(self) -> list[JoinedServer]:
        """The machines that take part, in the order of their ranks, else as they came; none if there are too few."""
        there = [one for one in self._joined.values() if one.host is not None and one.lost is None]
        there.sort(key=_order)
        job, members = self._job, list[JoinedServer]()
        for one in there:
            members.append(one)
            slots = self._slots(members)
            if len(members) >= (job.cluster.nodes or 1) and place(job.world, job.strategy.islands, len(members), slots):
                return members
        return []

    @staticmethod
    def _slots(servers: Sequence[object]) -> list[int]:
        return [server.offer.slots for server in servers if isinstance(server, JoinedServer) and server.offer]

    def _hear(self) -> None:
        """Besides answers offers, and notices who is gone."""
        super()._hear()
        for one in [*self._joined.values()]:
            if one.hear():
                self._answer(one)
            if one.ready and one not in self._servers:
                self._supply_spare(one)
            if one.lost is not None:
                self._forget(one)

    def _supply_spare(self, one: JoinedServer) -> None:
        """Who waits has what processes need before anybody needs it."""
        try:
            self._begin_supply(one)
            self._check_supply(one)
        except VerbundError as error:
            if one.lost is None:
                self._turn_away(one, error)

    def _unexpected(self, connection: Connection, role: str, number: int) -> None:
        if role == "join" and len(self._joined) < _MOST_JOINERS:
            self._tokens += 1
            one = self._joined[self._tokens] = JoinedServer(self._tokens, connection)
            self._poll(connection, one)
        elif role == "warm" and (found := self._joined.get(number)) is not None and found.connection is None:
            self._poll(connection, found)
            found.greet(connection)
        else:
            super()._unexpected(connection, role, number)

    def _answer(self, one: JoinedServer) -> None:
        assert one.offer is not None
        try:
            judge(one.offer, self._job.cluster.trusted_network, self._job.together)
        except VerbundError as error:
            self._turn_away(one, error)
            return
        name, taken = one.offer.address, [other.host.name for other in self._joined.values() if other.host]
        alike = 1
        while name in taken:
            alike += 1
            name = f"{one.offer.address}/{alike}"
        one.ask_it(name, self._asked)

    def _tell_supply(self, waiting: Sequence[WarmServer]) -> None:
        if time.monotonic() < self._tells:
            return
        self._tells = time.monotonic() + _TELL_SECONDS
        for server in waiting:
            if server.host is not None and server.supply.bytes:
                self._tell(f"host {server.host.name} has got {server.supply.bytes / 1e6:.0f} MB of task and data")

    def _turn_away(self, one: JoinedServer, error: VerbundError) -> None:
        self._turned_away.append(str(error))
        self._tell(f"turned away: {error}")
        one.refuse(error)

    def _forget(self, one: JoinedServer) -> None:
        del self._joined[one.token]
        for descriptor, other in [*self._polled.items()]:
            if other is one:
                del self._polled[descriptor]
                try:
                    self._epoll.unregister(descriptor)
                except OSError:
                    continue  # it is closed, which has done it
        if one not in self._servers:
            one.leave()  # else what it had is still to be told

    def _poll(self, connection: Connection, one: JoinedServer) -> None:
        self._polled[connection.fileno()] = one
        self._epoll.register(connection, select.EPOLLIN)

    # -- what is said --------------------------------------------------------------------------------------------

    def _invite(self) -> str:
        job = self._job
        there = sum(self._slots([*self._joined.values()]))
        more = f" ({there} are there)" if there else ""
        if job.together > 1:
            more = f", {job.together} on one host as there is no `cluster.trusted_network`{more}"
        return (
            f"waiting for {job.world} slots{more}: verbund join {self.joins_at} --secret-file "
            f"{self.invitation.secret_file}"
        )

    def _missing(self, limit: float, former: ClusterLost | None, members: Sequence[JoinedServer]) -> ClusterLost:
        slow = [member for member in members if not member.ready]
        if slow:
            return slow[0].late(limit)
        there = [one for one in self._joined.values() if one.host and one.offer]
        slots = sum(one.offer.slots for one in there if one.offer)
        who = ", ".join(f"{one.host.name} with {one.offer.slots}" for one in there if one.host and one.offer)
        nodes = self._job.cluster.nodes or 1
        what = f"{slots} of {self._job.world} slots" if slots < self._job.world else f"{len(there)} of {nodes} hosts"
        what = f"only {what} were there after {limit:g} s{f' ({who})' if who else ''}"
        if former is not None:
            what = f"{former.what}; nobody has taken its place: {what}"
        if self._turned_away:
            what += f"; turned away: {self._turned_away[-1]}"
        return ClusterLost(what, where="cluster", fix=f"{self._advice()}, or raise `cluster.join_within`")

    def _advice(self) -> str:
        return f"Run `verbund join {self.joins_at} --secret-file FILE` on more machines or with more `--slots`"


def _order(one: JoinedServer) -> tuple[bool, int, int]:
    rank = one.offer.rank if one.offer else None
    return rank is None, rank or 0, one.token
