"""Which clients train in a round: a function of seed and round."""

from __future__ import annotations

from collections.abc import Set

import numpy as np

from verbund.data.hashing import key
from verbund.data.permutation import Permutation

_SALT, _ONE = 0xC0407, 0x0E5
_BLOCK = 64


def joined(seed: int, round_: int, clients: int, rate: float) -> list[int]:
    """Poisson sampling: those of the clients 0 … clients − 1 that join, each with probability `rate` by a draw of its
    own; it may be none."""
    draws = np.random.Generator(np.random.Philox(key=key(seed, _SALT, round_))).random(clients)
    return [int(client) for client in np.flatnonzero(draws < rate)]


def sampled(seed: int, round_: int, clients: int, size: int) -> list[int]:
    """`size` of the clients 0 … clients − 1, in ascending order, without replacement, all equally likely."""
    places = Permutation(clients, key(seed, _SALT, round_))(np.arange(size))
    return sorted(int(place) for place in places)


def drawn(seed: int, number: int, clients: int, taken: Set[int]) -> int:
    """One of the clients that are not taken, all equally likely: a function of the seed and the draw's number.

    Raises:
        ValueError: if all are taken.
    """
    order = Permutation(clients, key(seed, _ONE, number))
    for low in range(0, clients, _BLOCK):
        for client in order(np.arange(low, min(low + _BLOCK, clients))).tolist():
            if client not in taken:
                return int(client)
    raise ValueError(f"all {clients} clients are taken")
