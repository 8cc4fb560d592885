"""Memory that is reserved, and taken from the machine only where it is written to."""

from __future__ import annotations

import contextlib
import math
import mmap

import torch
from torch import Tensor

_SMALL = 1 << 20


def reserve(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros. Of a large tensor a page exists from when something is written to it."""
    count = math.prod(shape)
    size = count * dtype.itemsize
    if size < _SMALL:
        return torch.zeros(shape, dtype=dtype)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    with contextlib.suppress(OSError):  # rows that are far apart would each take a huge page
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype, count=count).view(shape)


_NORESERVE = 0x4000  # Linux; the mmap module names it from Python 3.13 on
