"""Whole numbers of 1 to 32 bits each, packed.

First come the numbers' whole low bytes, a plane for each; then what is left of them, r bits each, eight numbers to r
bytes, the first number in the lowest bits. What fills up the last group is zero. Eight numbers are moved together
within a 64-bit word, in three steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

WIDEST = 32
_LANES = (0x0000_0000_0000_0001, 0x0000_0001_0000_0001, 0x0001_0001_0001_0001)
_AT_ONCE = 1 << 16  # numbers whose words stay in the cache; a multiple of eight
_WORD = np.dtype("<u8")


@dataclass(frozen=True)
class Bits:
    """Numbers that travel with `width` bits each: an array of unsigned integers below 2 ** width."""

    values: NDArray[Any]
    width: int


def dtype(width: int) -> np.dtype[Any]:
    """The smallest type of numpy that holds numbers of so many bits."""
    return np.dtype("u1" if width <= 8 else "<u2" if width <= 16 else "<u4")


def packed_size(count: int, width: int) -> int:
    """Bytes of so many numbers."""
    return count * (width // 8) + (count + 7) // 8 * (width % 8)


def pack(values: NDArray[Any], width: int) -> NDArray[np.uint8]:
    """The bytes of an array of unsigned integers.

    Raises:
        ValueError: if the array is of another type or a number is too large.
    """
    if not 1 <= width <= WIDEST or values.dtype.kind != "u":
        raise ValueError(f"numbers of type {values.dtype} do not travel with {width} bits")
    flat = np.ascontiguousarray(values).reshape(-1)
    if flat.size and flat.itemsize * 8 > width and int(flat.max()) >> width:
        raise ValueError(f"{int(flat.max())} does not fit into {width} bits")
    planes, rest = divmod(width, 8)
    packed = np.empty(packed_size(flat.size, width), np.uint8)
    for plane in range(planes):
        packed[plane * flat.size : (plane + 1) * flat.size] = flat >> np.uint8(8 * plane) & np.uint8(255)
    groups = packed[planes * flat.size :].reshape(-1, rest or 1)
    for start in range(0, flat.size if rest else 0, _AT_ONCE):
        some = flat[start : start + _AT_ONCE]
        padded = np.zeros((some.size + 7) // 8 * 8, np.uint8)
        padded[: some.size] = some >> np.uint8(8 * planes)
        words = _together(padded.view(_WORD), rest).view(np.uint8)
        groups[start // 8 : (start + padded.size) // 8] = words.reshape(-1, 8)[:, :rest]
    return packed


def unpack(packed: NDArray[np.uint8], width: int, into: NDArray[Any]) -> None:
    """Writes the numbers that `packed` holds into a flat array of unsigned integers.

    Raises:
        ValueError: if what fills up the last group is not zero.
    """
    planes, rest = divmod(width, 8)
    count = into.size
    if planes:
        into[:] = packed[:count]
        for plane in range(1, planes):
            into |= packed[plane * count : (plane + 1) * count].astype(into.dtype) << into.dtype.type(8 * plane)
    groups = packed[planes * count :].reshape(-1, rest or 1)
    for start in range(0, count if rest else 0, _AT_ONCE):
        some = into[start : start + _AT_ONCE]
        padded = np.zeros(((some.size + 7) // 8, 8), np.uint8)
        padded[:, :rest] = groups[start // 8 : start // 8 + len(padded)]
        found = _apart(padded.reshape(-1).view(_WORD), rest).view(np.uint8)
        if found[some.size :].any():
            raise ValueError("what fills up the last group of numbers is not zero")
        if planes:
            some |= found[: some.size].astype(into.dtype) << into.dtype.type(8 * planes)
        else:
            some[:] = found[: some.size]


def _together(words: NDArray[np.uint64], rest: int) -> NDArray[np.uint64]:
    """Moves the eight numbers of each word together, from eight bits each to `rest`."""
    for step, lanes in enumerate(reversed(_LANES)):
        size = rest << step
        mask = (1 << size) - 1
        gap = (8 << step) - size
        words = words & np.uint64(mask * lanes) | words >> np.uint64(gap) & np.uint64((mask << size) * lanes)
    return words


def _apart(words: NDArray[np.uint64], rest: int) -> NDArray[np.uint64]:
    """Undoes `_together`."""
    for step, lanes in reversed(list(enumerate(reversed(_LANES)))):
        size = rest << step
        mask = (1 << size) - 1
        gap = (8 << step) - size
        words = words & np.uint64(mask * lanes) | (words & np.uint64((mask << size) * lanes)) << np.uint64(gap)
    return words
