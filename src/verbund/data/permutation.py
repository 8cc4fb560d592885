"""A keyed permutation of [0, size) that needs no memory of its size, and its inverse.

Large domains: an alternating, possibly unbalanced Feistel network over the next power of two, with cycle walking back
into the domain (Black and Rogaway: Ciphers with Arbitrary Finite Domains, CT-RSA 2002). Fewer than two tries are
needed on average. Small domains, where such a network is far from uniform, are sorted by hash instead.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from verbund.data.hashing import Words, key, mix_array

Indices = NDArray[np.int64]

SORTED_LIMIT = 1024
_ROUNDS = 8
_32 = np.uint64(32)


class Permutation:
    """A permutation of [0, size), chosen by `seed`.

    Args:
        size: number of elements, at least 1 and below 2**62.
        seed: any number; two seeds give unrelated permutations.
    """

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        self._seed = seed
        if size > SORTED_LIMIT:
            bits = (size - 1).bit_length()
            self._low = np.uint64(bits // 2)
            self._low_mask = np.uint64((1 << (bits // 2)) - 1)
            self._high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
            self._adds = [np.uint64(key(seed, number, 0)) for number in range(_ROUNDS)]
            self._factors = [np.uint64(key(seed, number, 1) | 1) for number in range(_ROUNDS)]

    def __call__(self, indices: Indices) -> Indices:
        """Where each of `indices` goes; any shape, every value in [0, size)."""
        if self.size <= SORTED_LIMIT:
            return _sorted(self.size, self._seed)[0][indices]
        return self._walk(indices, inverse=False)

    def inverse(self, indices: Indices) -> Indices:
        """What goes to each of `indices`."""
        if self.size <= SORTED_LIMIT:
            return _sorted(self.size, self._seed)[1][indices]
        return self._walk(indices, inverse=True)

    def _walk(self, indices: Indices, inverse: bool) -> Indices:
        limit = np.uint64(self.size)
        words = self._network(np.atleast_1d(indices).astype(np.uint64), inverse)
        outside = np.flatnonzero(words >= limit)
        while outside.size:
            again = self._network(words[outside], inverse)
            words[outside] = again
            outside = outside[again >= limit]
        return words.astype(np.int64).reshape(np.shape(indices))

    def _network(self, words: Words, inverse: bool) -> Words:
        low, high = words & self._low_mask, words >> self._low
        for number in reversed(range(_ROUNDS)) if inverse else range(_ROUNDS):
            if number % 2:
                low ^= self._round(high, number) & self._low_mask
            else:
                high ^= self._round(low, number) & self._high_mask
        high <<= self._low
        high |= low
        return high

    def _round(self, half: Words, number: int) -> Words:
        """Multiply-shift hashing with a key: bits from 32 up depend on all of a half's at most 31 bits."""
        words = half + self._adds[number]
        words *= self._factors[number]
        words >>= _32
        return words


@lru_cache(maxsize=64)
def _sorted(size: int, seed: int) -> tuple[Indices, Indices]:
    hashes = mix_array(np.arange(size, dtype=np.uint64) ^ np.uint64(key(seed, size)))
    forward = np.argsort(hashes, kind="stable").astype(np.int64)
    backward = np.empty_like(forward)
    backward[forward] = np.arange(size)
    return forward, backward
