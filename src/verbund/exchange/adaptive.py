"""How many steps islands train alone, adapted to the loss."""

from __future__ import annotations

import math

EXCHANGES = 8
"""Exchanges over which the loss is averaged before the number of steps is chosen anew."""


class AdaptiveSteps:
    """Fewer steps between exchanges as the loss falls: far from the optimum islands that drift apart cost little, near
    it they cost accuracy (Wang and Joshi, "Adaptive Communication Strategies to Achieve the Best Error-Runtime
    Trade-off in Local-Update SGD", MLSys 2019, equation 17):

        H ← min(H, ⌈√(F / F₀) · H₀⌉)

    with F the mean loss of the last `EXCHANGES` exchanges, and F₀ that of the first ones. They choose anew after a
    time; here it is a number of exchanges, so that all islands choose the same.

    Args:
        first: H₀.
    """

    def __init__(self, first: int) -> None:
        self.steps = self._first = first
        self._loss = 0.0
        self._weight = 0.0
        self._exchanges = 0
        self._reference: float | None = None

    def observe(self, loss: float, weight: float) -> None:
        """Takes in what all islands together lost since the last exchange: a sum and its weight."""
        self._loss += loss
        self._weight += weight
        self._exchanges += 1
        if self._exchanges < EXCHANGES or not self._weight:
            return
        mean = self._loss / self._weight
        self._loss = self._weight = 0.0
        self._exchanges = 0
        if self._reference is None:
            self._reference = mean
            return
        wanted = math.ceil(math.sqrt(max(mean, 0.0) / self._reference) * self._first) if self._reference > 0 else 1
        self.steps = max(min(self.steps, wanted), 1)

    def state(self) -> list[float | None]:
        """JSON values for `load`."""
        return [self.steps, self._loss, self._weight, self._exchanges, self._reference]

    def load(self, state: list[float | None]) -> None:
        """Goes on from what `state` gave."""
        steps, loss, weight, exchanges, self._reference = state
        self.steps, self._exchanges = int(steps or 1), int(exchanges or 0)
        self._loss, self._weight = float(loss or 0.0), float(weight or 0.0)
