"""A counter-based hash in plain torch integers, vectorised over samples and elements.

A row (a sample) has a key of two 32-bit words, an element has one word that depends on its index alone and is cached.
For row key (a, b) and element word e:

    h = (a ^ e) * M1;  h ^= h >> 15;  h = (h + b) * M2;  h ^= h >> 16

The constants are those of the two-round integer hash `lowbias32` as improved by TheIronBorn (Chris Wellons,
"Prospecting for Hash Functions", 2018; https://github.com/skeeto/hash-prospector). Its first shift is left out: `a`
and `e` are mixed already, and a shift-xor is linear over xor. The shifts are logical: torch's are arithmetic for signed
integers, and with those `h ^ (h >> k)` would lose the sign. Keys are mixed with the finaliser of splitmix64 (Steele,
Lea and Flood,
"Fast Splittable Pseudorandom Number Generators", OOPSLA 2014).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from hashlib import blake2b

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_SPLITMIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_STEP = np.uint64(_GOLDEN)
_FACTORS = tuple(map(np.uint64, _SPLITMIX))
_SHIFTS = tuple(map(np.uint64, (30, 27, 31)))
# As tensors: torch takes three times as long over a Python number, which it wraps anew at every call.
_M1 = torch.tensor(0x21F0AAAD, dtype=torch.int32)
_M2 = torch.tensor(0x735A2D97, dtype=torch.int32)
_15 = torch.tensor(15, dtype=torch.int32)
_16 = torch.tensor(16, dtype=torch.int32)
_MASK_15 = torch.tensor((1 << 17) - 1, dtype=torch.int32)
_MASK_16 = torch.tensor((1 << 16) - 1, dtype=torch.int32)
# Elements hashed at once: the scratch of one chunk (two times 256 KiB) stays in a core's second-level cache.
CHUNK = 1 << 16
_LANE_BITS = 40


def _signed32(x: int) -> int:
    """The low 32 bits of `x` as torch's signed integer."""
    x &= 0xFFFFFFFF
    return x - (1 << 32) if x >> 31 else x


def mix(x: int) -> int:
    """Splitmix64's finaliser: a bijection of 64-bit integers, given and returned as 0 … 2^64 - 1."""
    x &= _MASK
    x = ((x ^ (x >> 30)) * _SPLITMIX[0]) & _MASK
    x = ((x ^ (x >> 27)) * _SPLITMIX[1]) & _MASK
    return x ^ (x >> 31)


def combine(*parts: int) -> int:
    """One 64-bit key out of several integers; the order matters."""
    key = 0
    for part in parts:
        key = mix(key + _GOLDEN + mix(part & _MASK))
    return key


@lru_cache(maxsize=65536)
def text_key(text: str) -> int:
    """A 64-bit key of a name, the same in every process."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def mix_array(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`mix` of every element, in place."""
    x ^= x >> _SHIFTS[0]
    x *= _FACTORS[0]
    x ^= x >> _SHIFTS[1]
    x *= _FACTORS[1]
    x ^= x >> _SHIFTS[2]
    return x


def sample_keys(key: int, ids: Tensor) -> Tensor:
    """Row keys of samples under `key`. Computed by numpy: a batch of ids is short, and torch's calls cost more.

    Args:
        key: 64 bits, e.g. `combine(seed, step)`.
        ids: int64 [B].

    Returns:
        Int32 [2, B, 1] on the device of `ids`: two words per sample.
    """
    mixed = mix_array(ids.numpy(force=True).astype(np.uint64) * _STEP + np.uint64(key))
    words = torch.from_numpy(mixed.view(np.int32).reshape(-1, 2).T.copy()).unsqueeze(2)
    return words if ids.device.type == "cpu" else words.to(ids.device)


def single_key(key: int, device: torch.device) -> Tensor:
    """`key` itself as a row key, int32 [2, 1, 1]."""
    high, low = (_signed32(key >> 32), _signed32(key))
    return torch.tensor([[[high]], [[low]]], dtype=torch.int32, device=device)


@lru_cache(maxsize=8192)
def use_key(name: str, use: int, device: torch.device) -> Tensor:
    """Int32 [2, 1, 1]: what the keys of samples are xored with for the n-th use in a module."""
    return single_key(combine(text_key(name), use), device)


_elements: dict[tuple[int, torch.device], Tensor] = {}


def elements(count: int, lane: int, device: torch.device) -> Tensor:
    """Words of the elements 0 … count - 1, int32 [count]; lanes are independent of each other.

    Cached: one tensor per lane and device, as long as the longest row seen, rounded up to a power of two.
    """
    cached = _elements.get((lane, device))
    if cached is None or cached.numel() < count:
        length = max(1024, 1 << (count - 1).bit_length())
        index = np.arange(length, dtype=np.uint64) + np.uint64(lane << _LANE_BITS)
        mixed = mix_array(index * _STEP + np.uint64(_SPLITMIX[0]))
        cached = _elements[lane, device] = torch.from_numpy(mixed.view(np.int32)[::2].copy()).to(device)
    return cached[:count]


def hashed(keys: Tensor, count: int, lane: int = 0, *, low_bits: bool = True) -> Iterator[tuple[slice, slice, Tensor]]:
    """Uniform 32-bit words for every row and element, chunk by chunk.

    Args:
        keys: int32 [2, R, 1], from `sample_keys` or `single_key`.
        count: elements per row.
        lane: independent repetition of the same elements.
        low_bits: False leaves out the last shift, for those who only compare: the high bits are good without it.

    Yields:
        Rows, elements, and their int32 words; the words are scratch, valid until the next chunk.
    """
    rows = keys.shape[1]
    if rows == 0 or count == 0:
        return
    high, low = keys.unbind(0)
    element = elements(count, lane, keys.device)
    # Other devices have no such cache to stay within, and pay for every launch.
    if rows * count <= CHUNK or keys.device.type != "cpu":
        yield slice(None), slice(None), _hash(high, low, element, None, low_bits)
        return
    row_step, element_step = (max(CHUNK // count, 1), count) if count <= CHUNK else (1, CHUNK)
    scratch = torch.empty((2, row_step * element_step), dtype=torch.int32, device=keys.device)
    for row in range(0, rows, row_step):
        in_rows = slice(row, min(row + row_step, rows))
        for start in range(0, count, element_step):
            in_elements = slice(start, min(start + element_step, count))
            shape = (in_rows.stop - row, in_elements.stop - start)
            free = scratch[:, : shape[0] * shape[1]].view(2, *shape)
            yield (
                in_rows,
                in_elements,
                _hash(high[in_rows], low[in_rows], element[in_elements], free, low_bits),
            )


def _hash(high: Tensor, low: Tensor, element: Tensor, free: Tensor | None, low_bits: bool) -> Tensor:
    if free is None:
        h = torch.bitwise_xor(high, element)
        shifted = torch.empty_like(h)
    else:
        h, shifted = free[0], free[1]
        torch.bitwise_xor(high, element, out=h)
    h.mul_(_M1)
    h.bitwise_xor_(torch.bitwise_right_shift(h, _15, out=shifted).bitwise_and_(_MASK_15))
    h.add_(low).mul_(_M2)
    if low_bits:
        h.bitwise_xor_(torch.bitwise_right_shift(h, _16, out=shifted).bitwise_and_(_MASK_16))
    return h
