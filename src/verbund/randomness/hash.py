"""A counter-based hash in plain torch integers, vectorised over samples and elements.

A sample has a key of two 32-bit words, an element has one word that depends on its index alone and is cached. For
row key (a, b) and element word e:

    h = (a ^ e) * M1;  h ^= h >> 15;  h = (h + b) * M2;  h ^= h >> 16

The constants are those of the two-round integer hash `lowbias32` as improved by TheIronBorn (Chris Wellons, "Prospecting
for Hash Functions", 2018; https://github.com/skeeto/hash-prospector). Its first shift is left out: `a` and `e` are
mixed already, and a shift-xor is linear over xor. Torch's shifts of signed integers are arithmetic; `h ^ (h >> k)`
is a bijection all the same. Keys are mixed with the finaliser of splitmix64 (Steele, Lea and Flood, "Fast Splittable
Pseudorandom Number Generators", OOPSLA 2014).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from hashlib import blake2b

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_SPLITMIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_M1 = 0x21F0AAAD
_M2 = 0x735A2D97
# Elements hashed at once: the scratch of one chunk (two times 256 KiB) stays in a core's second-level cache.
_CHUNK = 1 << 16
_LANE_BITS = 40


def _signed(x: int) -> int:
    """The 64 bits of `x` as torch's signed integer."""
    x &= _MASK
    return x - (1 << 64) if x >> 63 else x


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


def mix_tensor(x: Tensor) -> Tensor:
    """`mix` of every element of an int64 tensor; the bits are those of `mix`."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _signed(_SPLITMIX[0])
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _signed(_SPLITMIX[1])
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _words(keys: Tensor) -> Tensor:
    """Int64 keys [R] as two int32 words each, [2, R, 1]."""
    return keys.view(torch.int32).view(-1, 2).t().contiguous().unsqueeze(2)


def sample_keys(key: int, ids: Tensor) -> Tensor:
    """Row keys of samples under `key`.

    Args:
        key: 64 bits, e.g. `combine(seed, step)`.
        ids: int64 [B].

    Returns:
        Int32 [2, B, 1]: two words per sample.
    """
    return _words(mix_tensor(ids * _signed(_GOLDEN) + _signed(key)))


def single_key(key: int, device: torch.device) -> Tensor:
    """`key` itself as a row key, int32 [2, 1, 1]."""
    return _words(torch.tensor([_signed(key)], dtype=torch.int64, device=device))


_elements: dict[tuple[int, torch.device], Tensor] = {}


def elements(count: int, lane: int, device: torch.device) -> Tensor:
    """Words of the elements 0 … count - 1, int32 [count]; lanes are independent of each other.

    Cached: one tensor per lane and device, as long as the longest row seen, rounded up to a power of two.
    """
    cached = _elements.get((lane, device))
    if cached is None or cached.numel() < count:
        length = max(1024, 1 << (count - 1).bit_length())
        index = torch.arange(length, dtype=torch.int64, device=device) + (lane << _LANE_BITS)
        hashed = mix_tensor(index * _signed(_GOLDEN) + _signed(_SPLITMIX[0]))
        cached = _elements[lane, device] = hashed.view(torch.int32)[::2].contiguous()
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
    high, low = keys[0], keys[1]
    element = elements(count, lane, keys.device)
    # Other devices have no such cache to stay within, and pay for every launch.
    chunk = _CHUNK if keys.device.type == "cpu" else rows * count
    if rows * count <= chunk:
        row_step, element_step = rows, count
    elif count <= chunk:
        row_step, element_step = chunk // count, count
    else:
        row_step, element_step = 1, chunk
    scratch = torch.empty((2, row_step * element_step), dtype=torch.int32, device=keys.device)
    for row in range(0, rows, row_step):
        in_rows = slice(row, min(row + row_step, rows))
        for start in range(0, count, element_step):
            in_elements = slice(start, min(start + element_step, count))
            shape = (in_rows.stop - row, in_elements.stop - start)
            size = shape[0] * shape[1]
            h, shifted = scratch[0, :size].view(shape), scratch[1, :size].view(shape)
            torch.bitwise_xor(high[in_rows], element[in_elements], out=h)
            h.mul_(_M1)
            h.bitwise_xor_(torch.bitwise_right_shift(h, 15, out=shifted))
            h.add_(low[in_rows]).mul_(_M2)
            if low_bits:
                h.bitwise_xor_(torch.bitwise_right_shift(h, 16, out=shifted))
            yield in_rows, in_elements, h
