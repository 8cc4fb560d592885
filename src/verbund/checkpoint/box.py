"""Boxes of a global tensor: where a piece lies, where two overlap, whether many cover it exactly once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a global tensor: `offset` and `length` per dimension, in elements; () of a scalar."""

    offset: tuple[int, ...]
    length: tuple[int, ...]

    @staticmethod
    def whole(shape: Sequence[int]) -> Box:
        """The box that is the tensor itself."""
        return Box((0,) * len(shape), tuple(shape))

    @property
    def volume(self) -> int:
        """Elements in the box."""
        return math.prod(self.length)

    def inside(self, shape: Sequence[int]) -> bool:
        """Whether the box lies within a tensor of this shape."""
        return len(self.offset) == len(self.length) == len(shape) and all(
            min(start, count) >= 0 and start + count <= size
            for start, count, size in zip(self.offset, self.length, shape, strict=True)
        )

    def overlap(self, other: Box) -> Box | None:
        """The common elements of two boxes of one tensor; None if there are none."""
        offset, length = [], []
        for a, n, b, m in zip(self.offset, self.length, other.offset, other.length, strict=True):
            start = max(a, b)
            count = min(a + n, b + m) - start
            if count <= 0:
                return None
            offset.append(start)
            length.append(count)
        return Box(tuple(offset), tuple(length))

    def within(self, outer: Box) -> tuple[slice, ...]:
        """The indices of this box in a tensor that holds `outer`."""
        return tuple(
            slice(start - base, start - base + count)
            for start, count, base in zip(self.offset, self.length, outer.offset, strict=True)
        )

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{a + n}" for a, n in zip(self.offset, self.length, strict=False)) + "]"


def uncovered(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Why `boxes` do not cover a tensor of `shape` exactly once; None if they do.

    Boxes are swept along the first dimension, so that row-wise cuts of any number cost a sort.
    """
    if len(boxes) == 1 and boxes[0] == Box.whole(shape):
        return None  # nearly all tensors of most models
    for box in boxes:
        if not box.inside(shape):
            return f"the box {box} lies outside of the shape {list(shape)}"
    if not boxes:
        return "nobody saved it"
    total = math.prod(shape)
    filled = [box for box in boxes if box.volume]
    if total and not shape and len(filled) > 1:
        return f"it was saved {len(filled)} times"
    active: list[Box] = []
    for box in sorted(filled, key=lambda b: b.offset):
        active = [other for other in active if other.offset[0] + other.length[0] > box.offset[0]]
        for other in active:
            if common := box.overlap(other):
                return f"the elements {common} were saved twice"
        active.append(box)
    covered = sum(box.volume for box in filled)
    if covered != total:
        return f"only {covered} of its {total} elements were saved"
    return None
