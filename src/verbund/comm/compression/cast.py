"""Sixteen bits in place of thirty-two."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from verbund.comm.compression.codec import ALIGN, Codec, aligned

_TOP = 15  # the largest value lands in [2^14, 2^15): float16 ends at 65504, and all below it has the finest steps
_EXPONENTS = 126


class BFloat16(Codec):
    """bfloat16 has float32's range: nothing to scale."""

    def bytes_of(self, count: int) -> int:
        return aligned(2 * count)

    def encode(self, values: Tensor, message: Tensor, key: int = 0) -> None:
        message[: 2 * len(values)].view(torch.bfloat16).copy_(values)

    def decode(self, message: Tensor, values: Tensor) -> None:
        values.copy_(message[: 2 * len(values)].view(torch.bfloat16))


class Float16(Codec):
    """float16, times a power of two by which the largest value comes near the end of its range."""

    def bytes_of(self, count: int) -> int:
        return ALIGN + aligned(2 * count)

    def encode(self, values: Tensor, message: Tensor, key: int = 0) -> None:
        largest = float(values.abs().amax()) if len(values) else 0.0
        exponent = 0
        if largest and math.isfinite(largest):
            exponent = max(-_EXPONENTS, min(_EXPONENTS, _TOP - math.frexp(largest)[1]))
        message[:4].view(torch.float32).fill_(2.0**-exponent)
        message[4:8].view(torch.int32).fill_(not math.isfinite(largest))
        message[ALIGN : ALIGN + 2 * len(values)].view(torch.float16).copy_(values * 2.0**exponent)

    def finite(self, message: Tensor, count: int) -> bool:
        return bool(message[4:8].view(torch.int32) == 0)

    def decode(self, message: Tensor, values: Tensor) -> None:
        values.copy_(message[ALIGN : ALIGN + 2 * len(values)].view(torch.float16))
        values.mul_(message[:4].view(torch.float32))
