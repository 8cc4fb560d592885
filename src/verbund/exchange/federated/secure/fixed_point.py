"""Numbers as integers, and sums of integers as numbers again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from verbund.errors import InputError
from verbund.exchange.federated.keystream import Keystream
from verbund.exchange.federated.secure.layout import Layout


@dataclass(frozen=True)
class FixedPoint:
    """A grid of 2^bits − 1 values from −range to range, 0 among them.

    Args:
        bits: of each value.
        range: the largest size of a value that can be encoded.
        rounding: `nearest` (ties to even), or `stochastic`: up or down with probabilities that make the mean right.
    """

    bits: int
    range: float
    rounding: Literal["nearest", "stochastic"] = "nearest"

    @property
    def most(self) -> int:
        """The largest integer."""
        return (1 << (self.bits - 1)) - 1

    @property
    def step(self) -> float:
        """The difference of two neighbours on the grid."""
        return self.range / self.most

    def round(self, values: NDArray[Any], layout: Layout | None = None, random: Keystream | None = None) -> Any:
        """The integers nearest to value / step, or next to it: int64 from −most to most.

        Args:
            values: floating point, any shape.
            layout: whose names say where a wrong value is.
            random: what stochastic rounding draws from; default a fresh key of the operating system's.

        Raises:
            InputError: if a value is not finite or lies beyond the range. Nothing is clipped.
        """
        exact = np.asarray(values, np.float64)
        wrong = ~(np.abs(exact) <= self.range)
        if wrong.any():
            first = int(np.flatnonzero(wrong.reshape(-1))[0])
            raise InputError(
                f"{int(wrong.sum())} of {exact.size} values of the update lie beyond {self.range:g} or are not finite, "
                f"the first of them {exact.reshape(-1)[first]:g}; the largest is {np.nanmax(np.abs(exact)):g}",
                where=layout.locate(first) if layout else f"element {first}",
                fix="Raise `secure.range`, or clip updates (`privacy.clip`)",
            )
        scaled = exact / self.step
        if self.rounding == "nearest":
            return np.rint(scaled).astype(np.int64)
        draws = (random or Keystream.fresh()).words(0, scaled.size, np.uint64).reshape(scaled.shape)
        below = np.floor(scaled)
        up = (draws >> np.uint64(11)) * 2.0**-53 < scaled - below
        return np.clip(below.astype(np.int64) + up, -self.most, self.most)


def as_words(integers: NDArray[np.int64], word: np.dtype[Any]) -> NDArray[Any]:
    """Integers, as words of a sum modulo a power of two: flat, of type uint32 or uint64."""
    return integers.reshape(-1).astype(np.int64).view(np.uint64).astype(word)


def as_integers(words: NDArray[Any], bits: int) -> NDArray[np.int64]:
    """Words of `bits` bits as the integers from −2^(bits−1) on that they stand for."""
    return (words.astype(np.uint64) << np.uint64(64 - bits)).view(np.int64) >> np.int64(64 - bits)
