"""Placement: which worker runs on which host."""

from __future__ import annotations

from collections.abc import Sequence


def place(world: int, islands: int, hosts: int, slots: int | Sequence[int] | None = None) -> list[int] | None:
    """The host of each worker, in the order of islands and ranks.

    Workers fill the hosts in order; an island stays on one host where each of them fits on one.

    Args:
        world: all workers.
        islands: how many islands of equal size they make up.
        hosts: how many hosts there are.
        slots: how many workers a host takes, in all alike or one number a host; default: an even share.

    Returns:
        the hosts' numbers; None if there are too few slots.
    """
    size = world // islands
    if slots is None:
        # Even shares: of whole islands if there are enough of them, else of workers.
        units = islands if islands >= hosts else world
        even = [unit * hosts // units if units >= hosts else unit for unit in range(units)]
        return [host for host in even for _ in range(world // units)]
    room = [slots] * hosts if isinstance(slots, int) else list(slots)
    whole = [host for host, count in enumerate(room) for _ in range(count // size)]
    if len(whole) >= islands:
        return [host for host in whole[:islands] for _ in range(size)]
    spread = [host for host, count in enumerate(room) for _ in range(count)]
    return spread[:world] if len(spread) >= world else None
