"""Which clients train in a round: a function of seed and round."""

from __future__ import annotations

import numpy as np

from verbund.data.hashing import key
from verbund.data.permutation import Permutation

_SALT = 0xC0407


def sampled(seed: int, round_: int, clients: int, size: int) -> list[int]:
    """`size` of the clients 0 … clients − 1, in ascending order, without replacement, all equally likely."""
    places = Permutation(clients, key(seed, _SALT, round_))(np.arange(size))
    return sorted(int(place) for place in places)
