"""Sums and maxima of several workers' values, always in the order of the workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

_LOW = (torch.bfloat16, torch.float16)

CHUNK = 1 << 17
"""Bytes of one worker's that are taken at once: what is summed is still in the cache when it is copied."""


class Reducer:
    """Adds up, or takes the maximum. Half precision is added up in float32 and rounded once."""

    def __init__(self) -> None:
        self._sums = torch.empty(0)

    def into(self, target: Tensor, parts: Sequence[Tensor], maximum: bool) -> None:
        """Writes the sum of `parts` into `target`, which may be the first of them but no other."""
        if len(parts) == 1:
            if target is not parts[0]:
                target.copy_(parts[0])
            return
        first, second, *rest = parts
        if maximum:
            torch.maximum(first, second, out=target)
            for part in rest:
                torch.maximum(target, part, out=target)
        elif target.dtype in _LOW:
            count = target.numel()
            if self._sums.numel() < count:
                self._sums = torch.empty(count)
            sums = self._sums[:count]
            sums.copy_(first)
            sums.add_(second)
            for part in rest:
                sums.add_(part)
            target.copy_(sums)
        else:
            torch.add(first, second, out=target)
            for part in rest:
                target.add_(part)


def share(count: int, worker: int, workers: int, itemsize: int) -> tuple[int, int]:
    """The elements of `count` that a worker adds up: whole cache lines, so that no two write into the same one."""
    line = max(64 // itemsize, 1)
    size = -(-count // (workers * line)) * line
    return min(size * worker, count), min(size * (worker + 1), count)


def chunks(low: int, high: int, itemsize: int) -> Iterator[tuple[int, int]]:
    """Cuts a stretch of elements into chunks that stay in the cache."""
    length = max(CHUNK * torch.get_num_threads() // itemsize, 1)
    for begin in range(low, high, length):
        yield begin, min(begin + length, high)
