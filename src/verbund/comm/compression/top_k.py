"""The values of the largest size alone, each with its place (Aji and Heafield, "Sparse communication for distributed
gradient descent", 2017; Lin and others, "Deep Gradient Compression", 2018)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from verbund.comm.compression.codec import Codec, aligned

_SAMPLE = 64  # every so manieth value tells about how large the k-th largest is


class TopK(Codec):
    """The places (int32), then the values (float32).

    Args:
        density: the share of the values that is kept; at least one is.
    """

    sliced = False
    again = False

    def __init__(self, density: float) -> None:
        self.density = density

    def kept(self, count: int) -> int:
        """How many of `count` values are kept."""
        return min(count, max(1, round(self.density * count)))

    def bytes_of(self, count: int) -> int:
        return 2 * aligned(4 * self.kept(count))

    def encode(self, values: Tensor, message: Tensor, key: int = 0) -> None:
        places, kept = self._parts(message, len(values))
        chosen = largest(values, len(places))
        places.copy_(chosen)
        kept.copy_(values[chosen])

    def decode(self, message: Tensor, values: Tensor) -> None:
        values.zero_()
        self.add(message, values)

    def add(self, message: Tensor, values: Tensor, sign: float = 1.0) -> None:
        places, kept = self._parts(message, len(values))
        values.index_add_(0, places, kept.to(values.dtype), alpha=sign)

    def readable(self, message: Tensor, count: int) -> bool:
        places, _ = self._parts(message, count)
        return bool(((places >= 0) & (places < count)).all())

    def finite(self, message: Tensor, count: int) -> bool:
        # What is not a number counts as the largest, so it is among them.
        return bool(self._parts(message, count)[1].isfinite().all())

    def _parts(self, message: Tensor, count: int) -> tuple[Tensor, Tensor]:
        size = 4 * self.kept(count)
        return message[:size].view(torch.int32), message[aligned(size) :][:size].view(torch.float32)


def largest(values: Tensor, count: int) -> Tensor:
    """The places of the `count` values of the largest size, int64; what is not a number counts as the largest.

    A sample says above which size about a quarter more than wanted lie, and only those are compared, which takes a
    tenth of the time. If they are too few, all are.
    """
    sizes = values.abs()
    if _SAMPLE <= count < len(values) // 4:
        sample = sizes[::_SAMPLE]
        rank = count * len(sample) // len(values)
        bound = sample.topk(min(rank + rank // 4 + 8, len(sample)), sorted=False).values.min()
        candidates = _places(sizes.lt(bound).logical_not_())
        if len(candidates) >= count:
            return candidates[_top(sizes[candidates], count)]
    return _top(sizes, count)


def _top(sizes: Tensor, count: int) -> Tensor:
    if sizes.device.type == "cpu":  # does not sort what it finds, as torch's does
        below = len(sizes) - count
        return torch.from_numpy(np.argpartition(sizes.numpy(), below)[below:]) if count else sizes.new_empty(0).long()
    return sizes.topk(count, sorted=False).indices


def _places(chosen: Tensor) -> Tensor:
    if chosen.device.type == "cpu":  # numpy's is four times as fast
        return torch.from_numpy(np.flatnonzero(chosen.numpy()))
    return chosen.nonzero().view(-1)
