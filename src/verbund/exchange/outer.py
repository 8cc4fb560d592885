"""The outer optimiser: what is done with the averaged difference of the islands' parameters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class OuterOptimizer:
    """SGD with Nesterov momentum, as `torch.optim.SGD(nesterov=True)` computes it, on the difference Δ = common − own
    in place of a gradient (Douillard et al., "DiLoCo", 2023, algorithm 1):

        m ← μ·m + Δ        common ← common − η·(Δ + μ·m)

    With η = 1 and μ = 0 the common parameters become the mean of the islands' own: local SGD.

    Args:
        lr: η.
        momentum: μ.
    """

    lr: float = 1.0
    momentum: float = 0.0

    @torch.no_grad()
    def step(self, difference: Tensor, moments: Tensor | None) -> Tensor:
        """What is to be taken off the common parameters; overwrites both arguments.

        Args:
            difference: Δ, flat.
            moments: m, of the same shape; None where μ is 0.
        """
        if moments is not None:
            moments.mul_(self.momentum).add_(difference)
            difference.add_(moments, alpha=self.momentum)
        return difference if self.lr == 1.0 else difference.mul_(self.lr)
