"""Distributions from hashed words. All of them take row keys, int32 [2, R, 1], and fill [R, count].

Every number is a function of its row's key and its element index alone.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from verbund.randomness.hash import CHUNK, hashed

_BITS = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def uniform(keys: Tensor, count: int, dtype: torch.dtype, lane: int = 0) -> Tensor:
    """Uniform in [0, 1): multiples of 2^-24 in float32, 2^-53 in float64, 2^-11 in float16, 2^-8 in bfloat16.

    A lane of float64 uses two lanes of words, so that lanes 0, 1 … may be taken for any type.
    """
    shape = (keys.shape[1], count)
    if dtype == torch.float64:
        out = torch.empty(shape, dtype=dtype, device=keys.device)
        for rows, columns, h in hashed(keys, count, 2 * lane):
            torch.add(h, 2.0**31, out=out[rows, columns])
        out.mul_(2.0**-32)
        for rows, columns, h in hashed(keys, count, 2 * lane + 1):
            out[rows, columns] += ((h >> 11) + 2**20).to(dtype).mul_(2.0**-53)
        return out
    bits = _BITS[dtype]
    out = torch.empty(shape, dtype=torch.float32, device=keys.device)
    for rows, columns, h in hashed(keys, count, 2 * lane):
        out[rows, columns] = torch.bitwise_right_shift(h, 32 - bits, out=h)
    return out.add_(2.0 ** (bits - 1)).mul_(2.0**-bits).to(dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def normal(keys: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Standard normal (Box and Muller, 1958), computed in float32 at least; at most 5.8 (float64: 8.6) from 0."""
    wide = _wide(dtype)
    radius = uniform(keys, count, wide, 0).neg_().add_(1.0).log_().mul_(-2.0).sqrt_()
    angle = uniform(keys, count, wide, 1).mul_(2.0 * math.pi).cos_()
    return radius.mul_(angle).to(dtype)


def exponential(keys: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Exponential with rate 1; never 0, so that its logarithm is finite."""
    wide = _wide(dtype)
    smallest = 2.0**-54 if wide == torch.float64 else 2.0**-25
    return uniform(keys, count, wide).clamp_(min=smallest).neg_().log1p_().neg_().to(dtype)


def integers(keys: Tensor, count: int, low: int, high: int) -> Tensor:
    """Int64 in low … high - 1, out of 63 bits: no value is likelier than another by more than (high - low) / 2^63."""
    out = torch.empty((keys.shape[1], count), dtype=torch.int64, device=keys.device)
    for rows, columns, h in hashed(keys, count, 0):
        out[rows, columns] = h
    out.bitwise_and_(2**31 - 1).bitwise_left_shift_(32)
    for rows, columns, h in hashed(keys, count, 1):
        out[rows, columns] |= h.to(torch.int64) & (2**32 - 1)
    return out.remainder_(high - low).add_(low)


@lru_cache(maxsize=256)
def _threshold(p: float) -> Tensor:
    """The word below which a share `p` of all words lies."""
    return torch.tensor(max(min(round(p * 2.0**32), 2**32 - 1), 0) - 2**31, dtype=torch.int32)


@lru_cache(maxsize=256)
def _number(value: float, dtype: torch.dtype) -> Tensor:
    return torch.tensor(value, dtype=dtype)


def keep(keys: Tensor, count: int, p: float, dtype: torch.dtype, factor: float = 1.0) -> Tensor:
    """`factor` with probability 1 - p, else 0: a dropout mask, ready to be multiplied with."""
    out = torch.empty((keys.shape[1], count), dtype=dtype, device=keys.device)
    if p >= 1.0:
        return out.zero_()
    threshold = _threshold(p)
    whole = out.numel() <= CHUNK
    for rows, columns, h in hashed(keys, count, low_bits=False):
        part = out if whole else out[rows, columns]
        torch.ge(h, threshold, out=part)
        if factor != 1.0:
            part.mul_(_number(factor, dtype))
    return out


def bernoulli(keys: Tensor, count: int, p: float, dtype: torch.dtype) -> Tensor:
    """1 with probability p, else 0."""
    if dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        return keep(keys, count, 1.0 - p, dtype)
    return keep(keys, count, 1.0 - p, torch.float32).to(dtype)
