"""Integer hashing: the finaliser of SplitMix64, on numbers and on arrays.

Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators (OOPSLA 2014); the constants are Stafford's mix 13.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_ONE = 0xBF58476D1CE4E5B9
_TWO = 0x94D049BB133111EB
_GAMMA_W, _ONE_W, _TWO_W = np.uint64(_GAMMA), np.uint64(_ONE), np.uint64(_TWO)
_30, _27, _31 = np.uint64(30), np.uint64(27), np.uint64(31)


def mix(value: int) -> int:
    """SplitMix64 of one number; negative numbers and those over 64 bits wrap."""
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * _ONE) & _MASK
    value = ((value ^ (value >> 27)) * _TWO) & _MASK
    return value ^ (value >> 31)


def key(*parts: int) -> int:
    """One 64-bit key of several numbers; the order of the numbers matters."""
    result = 0
    for part in parts:
        result = mix(result ^ mix(part))
    return result


def mix_array(values: Words) -> Words:
    """`mix` of each element; `values` stays as it is."""
    words = values + _GAMMA_W
    words ^= words >> _30
    words *= _ONE_W
    words ^= words >> _27
    words *= _TWO_W
    words ^= words >> _31
    return words
