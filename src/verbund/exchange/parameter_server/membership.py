"""Membership: how a view changes when servers and islands come, and when a server has been given what it lacked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from verbund.errors import ClusterLost
from verbund.exchange.parameter_server.view import Seat, View


def first(places: Sequence[Sequence[int]], servers: int, islands: int) -> View:
    """The view before anybody has come.

    Args:
        places: by block the servers that are to hold it, the primary first.
        servers: how many seats there are.
        islands: how many clients.
    """
    holders = tuple(tuple(place) for place in places)
    return View(0, (Seat(),) * servers, holders, ((),) * len(holders), (0,) * islands)


def seated(view: View, server: int, address: str, generation: int, recovered: bool) -> View:
    """A server process has taken its seat.

    Args:
        view: before.
        server: the seat.
        address: where it listens.
        generation: of the process; it may also have come once more, with the same.
        recovered: whether it has all that its predecessor had acknowledged (from its log). Else it begins with nothing:
            what the former one held goes on with the next holder.

    Raises:
        ClusterLost: if nobody has some block any more.
    """
    former = view.seats[server]
    seats = tuple(Seat(address, generation) if n == server else seat for n, seat in enumerate(view.seats))
    new = replace(view, number=view.number + 1, seats=seats)
    if not former.address or generation <= former.generation or recovered:
        return new
    holders, joining = [], []
    for block, (had, waited) in enumerate(zip(view.holders, view.joining, strict=True)):
        if server not in had and server not in waited:
            holders.append(had)
            joining.append(waited)
            continue
        left = tuple(holder for holder in had if holder != server)
        if not left:
            raise ClusterLost(
                f"server {server} was lost, and nobody else has block {block}: its parameters are gone",
                fix="More `strategy.exchange.replicas` keep what more servers have at once",
            )
        # Who is left stays a holder, so that nothing counts without it, and it can follow if the next primary is lost
        # too. What it has seen of the lost one, and the new one has not, is replaced: it is sent each block whole.
        holders.append(left)
        joining.append(tuple(sorted({*waited, server})))
    return replace(new, holders=tuple(holders), joining=tuple(joining))


def joined(view: View, server: int, generation: int, blocks: Iterable[int]) -> View:
    """A server has been given blocks by their primaries: it holds them too; of one that is gone nothing changes."""
    if view.seats[server].generation != generation:
        return view
    holders, joining = list(view.holders), list(view.joining)
    for block in blocks:
        if server in joining[block]:
            joining[block] = tuple(other for other in joining[block] if other != server)
            holders[block] = (*holders[block], server)
    return replace(view, number=view.number + 1, holders=tuple(holders), joining=tuple(joining))


def entered(view: View, island: int, generation: int) -> View:
    """An island's workers have come; older ones of it may push no more. The island may be one that was not there."""
    known = (*view.clients, *[0] * (island + 1 - len(view.clients)))
    if known[island] == generation:
        return view
    clients = (*known[:island], generation, *known[island + 1 :])
    return replace(view, number=view.number + 1, clients=clients)
