"""Who takes part in a round: a function of the seed and the round, over the names of real clients or the numbers of
simulated ones; and what labels they need."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence, Set

import numpy as np

from verbund.data.hashing import key
from verbund.data.permutation import Permutation

_SALT, _ONE = 0xC0407, 0x0E5
_BLOCK = 64


def draw(seed: int, round_: int, attempt: int, names: Iterable[str], count: int) -> list[str]:
    """So many of the names, each equally likely, in the order of their names.

    The `count` names with the smallest hash of (seed, round, attempt, name): who is there besides changes nothing of
    the order of two names, so that the draw hardly depends on who has connected when.
    """
    ranked = sorted(set(names), key=lambda name: (_hash(seed, round_, attempt, name), name))
    return sorted(ranked[:count])


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


def selected(wanted: int, over_selection: float) -> int:
    """How many are asked so that `wanted` answer in time."""
    return max(wanted, math.ceil(wanted * over_selection - 1e-9))


def fits(labels: Mapping[str, str], selector: Mapping[str, str | Sequence[str]]) -> bool:
    """Whether labels have, for each key of the selector, its value or one of its values."""
    return all(
        labels.get(key) == wanted if isinstance(wanted, str) else labels.get(key) in wanted
        for key, wanted in selector.items()
    )


def _hash(seed: int, round_: int, attempt: int, name: str) -> bytes:
    return hashlib.sha256(f"cohort/{seed}/{round_}/{attempt}/{name}".encode()).digest()
