"""Noise from a cryptographic keystream: Gaussian, and Gaussian on the integers."""

from __future__ import annotations

import hashlib
import math
from decimal import Decimal, localcontext
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verbund.errors import InputError
from verbund.exchange.federated.keystream import Keystream

WIDEST = 1 << 16
"""Largest standard deviation of discrete noise: its table has 24 entries for each unit."""
_TAIL = 12
_PRECISION = 192


def source(seed: int | str | None, *purpose: Any) -> Keystream:
    """Where noise comes from.

    Args:
        seed: None, as in every real training: a fresh key of the operating system's. A number, as in simulations: a
            function of it, which whoever knows it can take off again. A text: likewise, of a secret that the workers
            of one client share.
        purpose: round, client, what for: no two uses of one seed may have the same.
    """
    if seed is None:
        return Keystream.fresh()
    return Keystream(hashlib.sha256(f"noise {seed} {purpose!r}".encode()).digest())


def gaussian(stream: Keystream, count: int) -> NDArray[np.float64]:
    """Standard normal numbers (Box and Muller, 1958), of uniform numbers of 53 bits; at most 8.6 from 0.

    As all noise in floating point, this is open to attacks on the lowest bits (Mironov, CCS 2012); noise on the
    integers is not.
    """
    pairs = (count + 1) // 2
    words = stream.words(0, 2 * pairs, np.uint64) >> np.uint64(11)
    radius = np.sqrt(-2.0 * np.log((words[:pairs] + 1.0) * 2.0**-53))
    angle = words[pairs:] * (2.0 * math.pi * 2.0**-53)
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]


def discrete_gaussian(stream: Keystream, sigma: float, count: int) -> NDArray[np.int64]:
    """Integers x with probabilities proportional to exp(−x² / 2σ²) (Canonne, Kamath, Steinke, NeurIPS 2020).

    By inversion of the cumulated probabilities with 128 random bits: each differs from the exact one by less than
    2⁻¹²⁷, and |x| ≥ 12 σ, whose probability is below 2⁻¹⁰⁰, does not occur.

    Raises:
        InputError: if σ is beyond `WIDEST`.
    """
    if not 0.0 < sigma <= WIDEST:
        raise InputError(
            f"noise with a standard deviation of {sigma:g} steps; {WIDEST} is the most",
            where="strategy.exchange.secure.bits",
            fix="Lower `secure.bits`, so that steps are larger",
        )
    bounds, high = _table(sigma)
    words = stream.words(0, 2 * count, np.uint64)
    first, second = words[:count], words[count:]
    places = np.searchsorted(high, first)
    for i in np.flatnonzero(high[places] == first):  # almost never: 64 bits do not decide
        drawn = (int(first[i]) << 64) | int(second[i])
        while bounds[places[i]] <= drawn:
            places[i] += 1
    return places - len(bounds) // 2


@lru_cache(maxsize=8)
def _table(sigma: float) -> tuple[list[int], NDArray[np.uint64]]:
    """For each integer from −12 σ to 12 σ the probability that x is at most that, times 2^128; and its upper half."""
    last = math.ceil(_TAIL * sigma)
    with localcontext() as context:
        context.prec = 80
        square = Decimal(sigma) ** 2
        one = Decimal(2) ** _PRECISION
        ratio, factor = int((-1 / (2 * square)).exp() * one), int((-1 / square).exp() * one)
    weight, half = 1 << _PRECISION, []
    for _ in range(last + 1):  # exp(−x²/2σ²): each over the one before is exp(−(2x+1)/2σ²)
        half.append(weight)
        weight = weight * ratio >> _PRECISION
        ratio = ratio * factor >> _PRECISION
    total = 2 * sum(half) - half[0]
    bounds, below = [], 0
    for each in (*reversed(half[1:]), *half):
        below += each
        bounds.append((below << 128) // total)
    high = np.array([min(bound >> 64, (1 << 64) - 1) for bound in bounds], np.uint64)
    return bounds, high
