"""Sums, never means: the one form in which losses and metrics travel."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Sums:
    """A loss or metric per sample, undivided.

    Added over micro-batches and workers and divided once, at the end, by the global weight. That makes accumulation,
    uneven batches, padding and unequal workers exact.

    Args:
        total: shape [B], the weighted value of each sample.
        weight: shape [B], what `total` is to be divided by: 1 for an ordinary sample, the number of counted tokens
            for a sequence, 0 for padding.
    """

    total: Tensor
    weight: Tensor
