"""Named tensors as one vector."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Layout:
    """Where each tensor lies in the vector: one after the other, by name.

    Args:
        shapes: by name.
    """

    shapes: Mapping[str, tuple[int, ...]]

    @staticmethod
    def of(tensors: Mapping[str, Any]) -> Layout:
        """That of these tensors or arrays."""
        return Layout({name: tuple(tensor.shape) for name, tensor in tensors.items()})

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Where each tensor begins."""
        offsets, total = {}, 0
        for name in sorted(self.shapes):
            offsets[name] = total
            total += math.prod(self.shapes[name])
        return offsets

    @property
    def length(self) -> int:
        """Elements of the vector."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    def join(self, tensors: Mapping[str, Any]) -> NDArray[np.float64]:
        """The vector of these arrays, or tensors in the host's memory.

        Raises:
            ValueError: if names or shapes are others.
        """
        if Layout.of(tensors) != Layout(dict(self.shapes)):
            raise ValueError("the tensors have other names or shapes than the layout")
        vector = np.empty(self.length)
        for name, offset in self.offsets.items():
            flat = np.asarray(tensors[name]).reshape(-1)
            vector[offset : offset + flat.size] = flat
        return vector

    def split(self, vector: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """The arrays of a vector."""
        return {
            name: vector[offset : offset + math.prod(self.shapes[name])].reshape(self.shapes[name])
            for name, offset in self.offsets.items()
        }

    def locate(self, element: int) -> str:
        """The tensor in which an element of the vector lies, and where in it."""
        name = max((offset, name) for name, offset in self.offsets.items() if offset <= element)[1]
        while math.prod(self.shapes[name]) <= element - self.offsets[name]:  # empty tensors begin where others do
            name = next(n for n in sorted(self.shapes, reverse=True) if n < name)
        index = np.unravel_index(element - self.offsets[name], self.shapes[name])
        return f"{name}[{', '.join(str(int(i)) for i in index)}]"
