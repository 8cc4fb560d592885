"""A warm server that comes by itself: a machine has joined, and started it there.

`verbund join` keeps a connection of its own, beside the warm server's. Through it a machine offers itself, hears what
is asked of it, and says why it leaves.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from verbund.cluster import host as hosts_
from verbund.cluster.server import Host, WarmServer
from verbund.comm.wire import Connection, WireError
from verbund.errors import ClusterLost, InputError, VerbundError, shortened

_END_SECONDS = 10.0
_WORDS_SECONDS = 0.5
_MOST_SLOTS = 4096


@dataclass(frozen=True)
class Offer:
    """What a machine offers.

    Args:
        address: its own address, at which its processes meet others.
        slots: how many workers it takes.
        rank: its place among the machines, if whoever started it has given it one.
        versions: of what computes there.
    """

    address: str
    slots: int
    rank: int | None
    versions: dict[str, str]

    def record(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)

    @staticmethod
    def of(record: Mapping[str, Any]) -> Offer:
        """What `record` described.

        Raises:
            ValueError: if it is no offer.
        """
        address, slots, rank, versions = (record.get(key) for key in ("address", "slots", "rank", "versions"))
        fits = isinstance(address, str) and isinstance(slots, int) and 0 < slots <= _MOST_SLOTS
        if not fits or not isinstance(versions, dict) or not (rank is None or isinstance(rank, int)):
            raise ValueError("this is no offer")
        return Offer(str(address), int(slots or 0), rank, {str(key): str(value) for key, value in versions.items()})


class JoinedServer(WarmServer):
    """Of a machine that has joined.

    Args:
        token: by which its warm server is known when it comes.
        control: the connection of who joined.
    """

    def __init__(self, token: int, control: Connection) -> None:
        super().__init__(-1, None, remote=True)
        self.token, self.control = token, control
        self.offer: Offer | None = None
        self._left: str | None = None
        """Why it leaves, as it says itself."""
        self._open = True
        self._broke = ""
        self._serving = False

    @property
    def name(self) -> str:
        return f"the warm server on host {self._host}"

    @property
    def ready(self) -> bool:
        """Whether its warm server is there, and has loaded what the job needs."""
        return self.lost is None and self._serving

    @property
    def supplied(self) -> bool:
        """Whether its host has the files, too, that processes need."""
        return self.ready and self.supply.places is not None

    @property
    def _host(self) -> str:
        return self.host.name if self.host else self.control.peer.address or "here"

    def hear(self) -> bool:
        """Reads what has come; whether its offer is new and waits for an answer."""
        before = self.offer
        self._read()
        if not self._open and self.lost is None:
            self.lost = self._loss(f"its `verbund join` is gone: {self._broke}")
        if self.connection is not None:
            self.drain()
            if self._replies and not self._serving:
                self._replies.clear()
                self._serving = True
        return before is None and self.offer is not None

    def greet(self, connection: Connection) -> None:
        """Its warm server is there. It is asked something at once, whose answer says that it can work."""
        self.connection = connection
        try:
            self.send("shared", {"marks": []})
        except ClusterLost:
            return  # `lost` says why

    def ask_it(self, name: str, asked: Mapping[str, Any]) -> None:
        """Takes its offer: it starts a warm server with these settings. `name` is what messages call the host."""
        assert self.offer is not None
        self.host = Host(name, self.offer.address)
        self._send("asked", {**asked, "address": self.offer.address, "number": self.token})

    def refuse(self, error: VerbundError) -> None:
        """Does not take its offer."""
        self._send("refused", {"error": error.record()})
        self.control.close()
        self._open = False
        self.lost = ClusterLost(error.what)

    def check_running(self) -> None:
        if self.lost is not None:
            raise self.lost

    def late(self, seconds: float) -> ClusterLost:
        return ClusterLost(f"host {self._host} has joined, but its warm server did not come within {seconds:.0f} s")

    def leave(self) -> None:
        """Tells it that all is over; `wait` sees to it."""
        self._send("end")
        super().leave()

    def wait(self) -> None:
        """Waits until it says that nothing is left there; it ends all by itself where its supervisor is gone."""
        if self.connection is not None:
            self.connection.close()
        deadline = time.monotonic() + _END_SECONDS
        while self._open and (left := deadline - time.monotonic()) > 0:
            try:
                self.control.receive(left)
            except WireError:
                break
        if self._open:
            self.control.close()
            self._open = False

    def _cut_off(self) -> None:
        if self.connection is not None:
            self.connection.end()
        self._send("kill")

    def _why(self, error: WireError) -> ClusterLost:
        deadline = time.monotonic() + _WORDS_SECONDS
        while self._open and self._left is None and time.monotonic() < deadline:
            if self.control.ready(max(0.0, deadline - time.monotonic())):
                self._read()
        self._send("kill")
        return self._loss(str(error))

    def _loss(self, otherwise: str) -> ClusterLost:
        names = [process.spec.name for process in self.living.values()]
        lost = f" with {', '.join(names)}" if names else ""
        return ClusterLost(f"host {self._host} is lost{lost}: {self._left or otherwise}")

    def _read(self) -> None:
        try:
            while self._open and self.control.ready():
                message = self.control.receive(_WORDS_SECONDS)
                if message.kind == "offer" and self.offer is None:
                    self.offer = Offer.of(message.fields)
                elif message.kind == "left":
                    self._left = shortened(str(message.fields.get("why")), 500)
        except (WireError, ValueError) as error:
            self._open, self._broke = False, str(error)
            self.control.close()

    def _send(self, kind: str, fields: Mapping[str, Any] | None = None) -> None:
        try:
            if self._open:
                self.control.send(kind, fields, _WORDS_SECONDS)
        except WireError:
            return  # what it means is noticed where it is read


def judge(offer: Offer, trusts: str | None, together: int) -> None:
    """Whether an offer can be taken.

    Args:
        offer: see there.
        trusts: the network in which all hosts must lie; None: anywhere.
        together: how many workers must lie on one host.

    Raises:
        InputError: if not.
    """
    hosts_.check(offer.address, {"problem": None, "versions": offer.versions})
    try:
        address = ipaddress.ip_address(offer.address)
    except ValueError:
        raise InputError(f"`{offer.address}` is no address", where="--address") from None
    if trusts is not None and address not in ipaddress.ip_network(trusts):
        raise InputError(
            f"has the address {address}, which does not lie in `trusted_network` {trusts}",
            where=f"host {offer.address}",
            fix="Join with `--address`, its own in that network",
        )
    if offer.slots < together:
        raise InputError(
            f"has {offer.slots} slot{'s' * (offer.slots > 1)} for {together} workers that must lie on one host, since "
            "no network is trusted",
            where=f"host {offer.address}",
            fix=f"Join with `--slots {together}`; or, if a network is yours alone, start the command with "
            "`--set cluster.trusted_network=10.0.0.0/24`, naming it",
        )
