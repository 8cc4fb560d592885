"""Memory that is reserved, and taken from the machine only where it is written to."""

from __future__ import annotations

import contextlib
import math
import mmap

import torch
from torch import Tensor

from verbund.checkpoint.piece import dtype_name
from verbund.errors import InputError

_SMALL = 1 << 20


def reserve(shape: tuple[int, ...], dtype: torch.dtype, name: str) -> Tensor:
    """Zeros. Of a large tensor a page exists from when something is written to it.

    Raises:
        InputError: if there are not as many addresses; it says that they are for the tensor `name`.
    """
    count = math.prod(shape)
    size = count * dtype.itemsize
    if size < _SMALL:
        return torch.zeros(shape, dtype=dtype)
    try:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    except (OSError, OverflowError):
        raise InputError(
            f"a process has no room for the addresses of {size / 1e12:.1f} TB, used or not",
            where=f"`{name}`, {list(shape)} {dtype_name(dtype)} of one server",
            fix="Use a smaller table, or more servers (`strategy.exchange.servers`)",
        ) from None
    with contextlib.suppress(OSError):  # rows that are far apart would each take a huge page
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype, count=count).view(shape)


_NORESERVE = 0x4000  # Linux; the mmap module names it from Python 3.13 on
