"""The view: which servers there are, and who holds which block. The coordinator makes it; a newer one replaces it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Seat:
    """A server's place.

    Args:
        address: where it listens, as the wire writes it; empty while nobody sits there.
        generation: of the process.
    """

    address: str = ""
    generation: int = 0


@dataclass(frozen=True)
class View:
    """Who holds what.

    Args:
        number: rises with every change.
        seats: by server.
        holders: by block: the servers that have it whole, the primary first. A push counts once all of them have it.
        joining: by block: servers that the primary has to give it to; they become holders when it says so.
        clients: by island the generation that may push.
    """

    number: int
    seats: tuple[Seat, ...]
    holders: tuple[tuple[int, ...], ...]
    joining: tuple[tuple[int, ...], ...]
    clients: tuple[int, ...]

    def primary(self, block: int) -> int:
        """The server that pushes and pulls of a block go to."""
        return self.holders[block][0]

    def record(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    @staticmethod
    def of(record: dict[str, Any]) -> View:
        """The view that `record` gave."""
        return View(
            int(record["number"]),
            tuple(Seat(str(seat["address"]), int(seat["generation"])) for seat in record["seats"]),
            tuple(tuple(map(int, servers)) for servers in record["holders"]),
            tuple(tuple(map(int, servers)) for servers in record["joining"]),
            tuple(map(int, record["clients"])),
        )
