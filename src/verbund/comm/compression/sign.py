"""One bit a value, and the mean size of a block: Karimireddy and others, "Error feedback fixes SignSGD" (2019).

Scales are of blocks rather than of layers (Zheng, Huang and Kwok, "Communication-efficient distributed blockwise
momentum SGD with error-feedback", 2019), so that the bounds of tensors do not matter.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from verbund.comm.compression.codec import Codec, aligned

BLOCK = 256


class Sign(Codec):
    """The bits, then the scales."""

    unit = BLOCK

    def bytes_of(self, count: int) -> int:
        return aligned(-(-count // 8)) + aligned(4 * -(-count // BLOCK))

    def encode(self, values: Tensor, message: Tensor, key: int = 0) -> None:
        bits, scales = self._parts(message, len(values))
        whole = len(values) // BLOCK
        sizes = values.abs()
        scales[:whole] = sizes[: whole * BLOCK].view(-1, BLOCK).mean(1)
        if whole < len(scales):
            scales[whole] = sizes[whole * BLOCK :].mean()
        _pack(values >= 0, bits)

    def decode(self, message: Tensor, values: Tensor) -> None:
        bits, scales = self._parts(message, len(values))
        whole = len(values) // BLOCK
        values.copy_(_unpack(bits, len(values)))
        values[: whole * BLOCK].view(-1, BLOCK).mul_(scales[:whole, None])
        values[whole * BLOCK :].mul_(scales[whole:])

    def finite(self, message: Tensor, count: int) -> bool:
        return bool(self._parts(message, count)[1].isfinite().all())

    def _parts(self, message: Tensor, count: int) -> tuple[Tensor, Tensor]:
        size = -(-count // 8)
        return message[:size], message[aligned(size) :][: 4 * -(-count // BLOCK)].view(torch.float32)


def _pack(positive: Tensor, bits: Tensor) -> None:
    """Eight truths a byte, the first the highest."""
    if positive.device.type == "cpu":
        bits.copy_(torch.from_numpy(np.packbits(positive.numpy())))
        return
    padded = positive.new_zeros(8 * len(bits))
    padded[: len(positive)] = positive
    shifts = torch.arange(7, -1, -1, dtype=torch.uint8, device=bits.device)
    bits.copy_((padded.view(-1, 8).to(torch.uint8) << shifts).sum(1))


def _unpack(bits: Tensor, count: int) -> Tensor:
    """1 and -1, float32."""
    return _table(bits.device).index_select(0, bits.int()).view(-1)[:count]


@lru_cache(maxsize=8)
def _table(device: torch.device) -> Tensor:
    """The eight signs of every byte."""
    truths = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)
    return torch.from_numpy(truths.astype(np.float32) * 2 - 1).to(device)
