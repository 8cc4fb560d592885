"""Follows the generators that a recorded constructor draws from, without drawing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from verbund.mesh.initial.tape import Draw, NotRecordable


class Generators:
    """Which state each recorded draw begins with.

    While recording nothing is drawn, so a generator's true state is not known. After each draw it gets a state of our
    own that stands for it. So it is seen when the constructor seeds a generator, or keeps a state and returns to it.
    """

    def __init__(self) -> None:
        self._expected: dict[torch.Generator, bytes | None] = {}
        self._marks: dict[bytes, int] = {}
        self._draws = 0

    def start(self, generator: torch.Generator) -> None:
        """From now on nothing has been done to it."""
        self._expected[generator] = _bytes(generator)

    def draw(self, generator: torch.Generator) -> Draw:
        """What an operation must know that draws from `generator` now.

        Raises:
            NotRecordable: if something else drew from it.
        """
        if generator.device.type != "cpu":
            raise NotRecordable(f"random numbers are drawn on {generator.device}")
        draw = Draw(generator, self._draws, self._moved(generator))
        self._draws += 1
        marked = generator.get_state()
        # Behind the seed, which stays, lie the words of the Mersenne twister.
        marked.numpy().view(np.int64)[8] = draw.number
        generator.set_state(marked)
        self._expected[generator] = state = _bytes(generator)
        self._marks[state] = draw.number
        return draw

    def ends(self) -> Iterator[tuple[torch.Generator, int | Tensor]]:
        """The generators that were moved after their last draw, and where to."""
        for generator in self._expected:
            moved = self._moved(generator)
            if moved is not None:
                yield generator, moved

    def _moved(self, generator: torch.Generator) -> int | Tensor | None:
        state = _bytes(generator)
        expected = self._expected.get(generator)
        if state == expected:
            return None
        if state in self._marks:
            return self._marks[state]
        if expected is not None and state != _bytes(torch.Generator().manual_seed(generator.initial_seed())):
            raise NotRecordable("a random generator was moved by something other than operations on tensors")
        return generator.get_state()


def _bytes(generator: torch.Generator) -> bytes:
    return generator.get_state().numpy().tobytes()
