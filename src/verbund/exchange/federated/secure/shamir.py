"""Secrets divided so that any `threshold` shares give them back and fewer tell nothing (Shamir, CACM 1979).

The field is that of the integers modulo 2^255 - 19. A share is the value of a random polynomial at a point from 1
on; its value at 0 is the secret.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from operator import mul

import numpy as np
from numpy.typing import NDArray

PRIME = 2**255 - 19
SHARE_BYTES = 32
MOST_POINTS = (1 << 12) - 1
_LIMBS, _LIMB_BITS = 5, 51
_LIMB = np.uint64((1 << _LIMB_BITS) - 1)
_FOLD = np.uint64(19)  # 2^255 modulo the prime


def share(values: Sequence[int], threshold: int, points: int) -> NDArray[np.uint8]:
    """Shares of several secrets at the points 1 … `points`: uint8 [points, secrets, 32], little-endian.

    All points are computed together by Horner's rule, in limbs of 51 bits: a limb times a point has 63.

    Args:
        values: the secrets, below `PRIME`.
        threshold: how many shares give a secret back.
        points: how many there are, at most `MOST_POINTS`.

    Raises:
        ValueError: if the numbers do not fit.
    """
    if not 1 <= threshold <= points <= MOST_POINTS or not all(0 <= value < PRIME for value in values):
        raise ValueError(f"{threshold} of {points} shares (at most {MOST_POINTS}), of secrets below 2^255 - 19")
    polynomial = [[secrets.randbelow(PRIME) for _ in values] for _ in range(threshold - 1)]
    x = np.arange(1, points + 1, dtype=np.uint64)
    y = np.zeros((_LIMBS, len(values), points), np.uint64)
    for coefficients in (*polynomial, values):
        y *= x
        y += _limbs(coefficients)[:, :, None]
        carry = y >> np.uint64(_LIMB_BITS)
        y &= _LIMB
        y[1:] += carry[:-1]
        y[0] += carry[-1] * _FOLD
    out = np.empty((points, len(values), SHARE_BYTES), np.uint8)
    for number in range(len(values)):
        for point, limbs in enumerate(y[:, number].T.tolist()):
            whole = sum(limb << (_LIMB_BITS * i) for i, limb in enumerate(limbs)) % PRIME
            out[point, number] = np.frombuffer(whole.to_bytes(SHARE_BYTES, "little"), np.uint8)
    return out


def reconstruct(shares: Mapping[int, bytes]) -> int:
    """The secret, from as many shares as its threshold says, by point: Lagrange's formula at 0.

    Raises:
        ValueError: if a share is not below `PRIME`.
    """
    points = tuple(sorted(shares))
    total = 0
    for point, factor in zip(points, _factors(points), strict=True):
        value = int.from_bytes(shares[point], "little")
        if value >= PRIME:
            raise ValueError(f"share {point} is no element of the field")
        total += factor * value
    return total % PRIME


@lru_cache(maxsize=1024)
def _factors(points: tuple[int, ...]) -> tuple[int, ...]:
    """Lagrange's factors at 0, with a single inversion for all (Montgomery's trick)."""
    bottoms, tops = [], []
    for point in points:
        top = bottom = 1
        for other in points:
            if other != point:
                top = top * other % PRIME
                bottom = bottom * (other - point) % PRIME
        tops.append(top)
        bottoms.append(bottom)
    before = list(accumulate(bottoms, lambda a, b: mul(a, b) % PRIME, initial=1))
    inverse = pow(before[-1], -1, PRIME)
    factors = []
    for number in reversed(range(len(points))):
        factors.append(tops[number] * inverse * before[number] % PRIME)
        inverse = inverse * bottoms[number] % PRIME
    return tuple(reversed(factors))


def _limbs(values: Sequence[int]) -> NDArray[np.uint64]:
    mask = (1 << _LIMB_BITS) - 1
    return np.array([[value >> _LIMB_BITS * i & mask for value in values] for i in range(_LIMBS)], np.uint64)
