"""Whole numbers of 8 or 4 bits with a scale per block: the largest value of a block becomes 127, or 7."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from verbund.comm.compression.codec import SLICE, Codec, aligned
from verbund.randomness.hash import hashed, single_key

BLOCKS = {8: 256, 4: 128}
"""Values that share a scale, by bits."""
_LARGEST = {8: 127.0, 4: 7.0}
_ZERO = 8  # what 4 bits hold for 0
_TINY = torch.finfo(torch.float32).tiny


def packed_bytes(count: int, bits: int) -> int:
    """Bytes that `count` numbers take; of an odd count of 4 bits the last has a byte of its own."""
    return count if bits == 8 else (count + 1) // 2


class Blocks(Codec):
    """The numbers, packed, and then the scales, one per block.

    A block with a value that is not finite comes back as not finite.

    Args:
        bits: 8 or 4.
        stochastic: round up or down by a draw whose mean is the value itself; else to the nearest.
    """

    def __init__(self, bits: int, stochastic: bool = False) -> None:
        self.bits, self.stochastic = bits, stochastic
        self.unit = BLOCKS[bits]

    def bytes_of(self, count: int) -> int:
        return aligned(packed_bytes(count, self.bits)) + aligned(4 * -(-count // self.unit))

    def encode(self, values: Tensor, message: Tensor, key: int = 0) -> None:
        packed, scales = self._parts(message, len(values))
        for number, (part, numbers, scale) in enumerate(_blocks(values, packed, scales, self.bits)):
            _quantise(part, numbers, scale, self.bits, key + number if self.stochastic else None)

    def decode(self, message: Tensor, values: Tensor) -> None:
        packed, scales = self._parts(message, len(values))
        for part, numbers, scale in _blocks(values, packed, scales, self.bits):
            _dequantise(numbers, scale, part, self.bits)

    def finite(self, message: Tensor, count: int) -> bool:
        return bool(self._parts(message, count)[1].isfinite().all())

    def _parts(self, message: Tensor, count: int) -> tuple[Tensor, Tensor]:
        size = packed_bytes(count, self.bits)
        scales = message[aligned(size) :][: 4 * -(-count // self.unit)]
        return message[:size], scales.view(torch.float32)


def _blocks(values: Tensor, packed: Tensor, scales: Tensor, bits: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Whole blocks by the slice as [blocks, values], and a last one that is shorter, each with its numbers, as
    [blocks, bytes], and scales, as [blocks, 1]."""
    block = BLOCKS[bits]
    whole = len(values) // block * block
    for low in range(0, whole, SLICE):
        high = min(low + SLICE, whole)
        numbers = packed[low * bits // 8 : high * bits // 8].view(-1, block * bits // 8)
        yield values[low:high].view(-1, block), numbers, scales[low // block : high // block].view(-1, 1)
    if whole < len(values):
        yield values[whole:].view(1, -1), packed[whole * bits // 8 :].view(1, -1), scales[whole // block :].view(1, 1)


def _quantise(values: Tensor, packed: Tensor, scales: Tensor, bits: int, key: int | None) -> None:
    largest = values.abs().amax(1, keepdim=True)
    scales.copy_(largest).div_(_LARGEST[bits])
    # A block of zeros, or of what vanishes beside the smallest float32, becomes zeros; NaN stays in the scale.
    scales[scales < _TINY] = 0.0
    numbers = values.float() / torch.where(scales == 0, torch.inf, scales)
    if key is None:
        numbers.round_()
    else:
        _draw_into(numbers, key)
        numbers.clamp_(-_LARGEST[bits], _LARGEST[bits])
    if bits == 8:
        packed.view(torch.int8).copy_(numbers)
        return
    half = (numbers.shape[1] + 1) // 2
    nibbles = numbers.add_(_ZERO).nan_to_num_(0.0).to(torch.uint8)
    packed.copy_(nibbles[:, :half])
    packed[:, : numbers.shape[1] - half].bitwise_or_(nibbles[:, half:].bitwise_left_shift_(4))


def _draw_into(numbers: Tensor, key: int) -> None:
    """Rounds up with the probability of what is behind the point."""
    flat = numbers.view(1, -1)
    for _, elements, words in hashed(single_key(key, numbers.device), flat.shape[1]):
        flat[:, elements].add_(words, alpha=2.0**-32)
    numbers.add_(0.5).floor_()


def _dequantise(packed: Tensor, scales: Tensor, values: Tensor, bits: int) -> None:
    if bits == 8:
        values.copy_(packed.view(torch.int8))
    else:
        half = packed.shape[1]
        values[:, :half].copy_(packed & 15)
        values[:, half:].copy_((packed >> 4)[:, : values.shape[1] - half])
        values.sub_(_ZERO)
    values.mul_(scales)
