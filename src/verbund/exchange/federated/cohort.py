"""Who takes part in a round: labels, and a draw that is a function of seed, round and names alone."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence


def draw(seed: int, round_: int, attempt: int, names: Iterable[str], count: int) -> list[str]:
    """So many of the names, each equally likely, in the order of their names.

    The `count` names with the smallest hash of (seed, round, attempt, name): who is there besides changes nothing of
    the order of two names, so that the draw hardly depends on who has connected when.
    """
    ranked = sorted(set(names), key=lambda name: (_hash(seed, round_, attempt, name), name))
    return sorted(ranked[:count])


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
