"""What hides a client's vector until all masks of a round have been added up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verbund.exchange.federated.keystream import Keystream


@dataclass(frozen=True, repr=False)
class Masks:
    """A client's own mask and one for each pair that it is part of.

    Each rank of the client's mesh can have them, and masks its own pieces: what an element gets depends on where it
    lies in the whole vector, and on nothing else.

    Args:
        keys: keys of keystreams, and whether each is added (1) or taken away (-1).
        word: the type of a masked element.
        bits: how many of its bits count.
    """

    keys: Sequence[tuple[bytes, int]]
    word: np.dtype[Any]
    bits: int

    def apply(self, words: NDArray[Any], offset: int = 0) -> NDArray[Any]:
        """The words, masked.

        Args:
            words: a run of the vector, flat, of type `word`; stays as it is.
            offset: where it begins in the vector.
        """
        masked = np.array(words, self.word)
        for key, sign in self.keys:
            Keystream(key).add(masked, offset, sign)
        return reduced(masked, self.bits)


Contribution = Callable[[Masks], NDArray[Any]]
"""Gives a client's vector, masked."""


def whole(words: NDArray[Any]) -> Contribution:
    """The contribution of a client that has its vector in one process."""
    return lambda masks: masks.apply(words)


def reduced(words: NDArray[Any], bits: int) -> NDArray[Any]:
    """The words modulo 2 to the power of `bits`, in place."""
    words &= words.dtype.type((1 << bits) - 1)
    return words
