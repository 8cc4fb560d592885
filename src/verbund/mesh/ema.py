"""An exponential moving average of the weights (Polyak and Juditsky, 1992, in its exponential form)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class ExponentialMovingAverage:
    """average ← decay · average + (1 − decay) · weights, after every optimiser step.

    Args:
        named: the averaged parameters by name.
        decay: between 0 and 1.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], decay: float) -> None:
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self._averages = [parameter.detach().clone() for parameter in self._parameters]
        self._decay = decay

    def update(self) -> None:
        """Takes the current weights in."""
        with torch.no_grad():
            torch._foreach_lerp_(self._averages, list(self._parameters), 1.0 - self._decay)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Within the block the parameters hold the average."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The averages by their parameters' names."""
        return zip(self._names, self._averages, strict=True)

    def _swap(self) -> None:
        for parameter, average in zip(self._parameters, self._averages, strict=True):
            held = parameter.data
            parameter.data = average
            average.data = held
