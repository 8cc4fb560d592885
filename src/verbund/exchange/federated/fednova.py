"""FedNova: clients that take more local steps do not count more for it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from verbund.exchange.federated.rule import Sums, moved
from verbund.exchange.federated.server_optimizers import Averaging
from verbund.exchange.federated.update import Update

NORMALISER = "normaliser"
"""The name under which a client sends ‖aᵢ‖₁, shape [1]."""


def normaliser(steps: int, momentum: float = 0.0) -> float:
    """‖a‖₁ of SGD: how much a gradient counts in a client's difference, summed over its steps (Wang et al., "Tackling
    the Objective Inconsistency Problem in Heterogeneous Federated Optimization", 2020, section 4.1).

    With heavy-ball momentum ρ: (τ − ρ·(1 − ρ^τ)/(1 − ρ)) / (1 − ρ); without: τ.
    """
    if momentum == 0.0:
        return float(steps)
    return (steps - momentum * (1.0 - momentum**steps) / (1.0 - momentum)) / (1.0 - momentum)


class FedNova(Averaging):
    """x ← x + η · (Σ pᵢ ‖aᵢ‖₁) · Σ pᵢ Δᵢ / ‖aᵢ‖₁ with pᵢ = wᵢ / Σ w (Wang et al. 2020, equations 6 to 9)."""

    def contribution(self, update: Update) -> Mapping[str, Tensor]:
        length = update.aux[NORMALISER]
        factor = 1.0 / float(length)
        difference = {
            name: values if name in self.plain else values.to(torch.float64) * factor
            for name, values in update.difference.items()
        }
        return {**difference, NORMALISER: length}

    def apply(self, parameters: Mapping[str, Tensor], sums: Sums) -> dict[str, Tensor]:
        effective = float(sums.mean(NORMALISER))
        return {
            name: moved(values, sums.mean(name), 1.0 if name in self.plain else self.rate * effective)
            for name, values in parameters.items()
        }
