"""FedBuff: a step for every K updates, whoever they come from and however old they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from verbund.exchange.federated.rule import Sums
from verbund.exchange.federated.server_optimizers import Averaging
from verbund.exchange.federated.update import Update


class FedBuff(Averaging):
    """Buffered asynchronous aggregation (Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation",
    2022, algorithm 1, with the staleness weights of section 5.2): x ← x + η · Σ wᵢ·(1 + sᵢ)^−p·Δᵢ / Σ wᵢ, where sᵢ is
    the number of steps taken since the client got its parameters. If all are fresh it is FedAvg.

    Args:
        rate: η.
        power: p; 1/2 in the paper.
        plain: see `SumRule`.
    """

    sees_each: ClassVar[bool] = True

    def __init__(self, rate: float = 1.0, power: float = 0.5, plain: Sequence[str] = ()) -> None:
        super().__init__(rate, plain)
        self._power = power
        self.version = 0
        """The steps taken so far."""

    def staleness(self, update: Update) -> int:
        """How many steps have been taken since the update's client got its parameters."""
        return max(self.version - update.base_version, 0)

    def contribution(self, update: Update) -> Mapping[str, Tensor]:
        factor = (1.0 + self.staleness(update)) ** -self._power
        if factor == 1.0:
            return update.difference
        return {name: values.to(torch.float64) * factor for name, values in update.difference.items()}

    def apply(self, parameters: Mapping[str, Tensor], sums: Sums) -> dict[str, Tensor]:
        self.version += 1
        return super().apply(parameters, sums)

    def state(self) -> dict[str, Tensor]:
        return {"version": torch.tensor([self.version], dtype=torch.int64)}

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.version = int(state["version"])
