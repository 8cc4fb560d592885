"""FTRL-proximal, the optimiser of sparse linear models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softshrink


class FTRL(torch.optim.Optimizer):
    """McMahan and others, "Ad Click Prediction: a View from the Trenches" (2013), algorithm 1:

        σ = (√(n + g²) − √n) / α        z ← z + g − σ·w        n ← n + g²
        w = 0 where |z| ≤ λ₁, else −(z − sign(z)·λ₁) / ((β + √n)/α + λ₂)

    Where w is not 0, z follows from w; so what is kept matters for weights that are 0 alone. Weights may begin with any
    value, and the learning rate may follow a schedule: σ is then the difference of 1/η = (β + √n)/α between two steps.

    Args:
        params: as for every optimiser of torch.
        lr: α.
        beta: β; the larger, the smaller the first steps.
        l1: λ₁; the larger, the more weights are exactly 0.
        l2: λ₂.
    """

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 1.0, l1: float = 0.0, l2: float = 0.0) -> None:
        for name, value in {"learning rate": lr, "l1": l1, "l2": l2}.items():
            if not value >= 0.0:
                raise ValueError(f"Invalid {name}: {value}")
        if not beta > 0.0:
            raise ValueError(f"Invalid beta: {beta}")
        super().__init__(params, {"lr": lr, "beta": beta, "l1": l1, "l2": l2})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of all parameters that have gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                for key in ("n", "z") if group["l1"] else ("n",):
                    if key not in state:
                        state[key] = torch.zeros_like(parameter)
                _step(parameter, parameter.grad, state["n"], state.get("z"), group)
        return loss


def _step(w: Tensor, g: Tensor, n: Tensor, z: Tensor | None, group: dict[str, Any]) -> None:
    n.addcmul_(g, g)
    if not group["lr"]:
        return
    divisor = n.sqrt().add_(group["beta"]).div_(group["lr"]).add_(group["l2"])
    if z is None:
        w.addcdiv_(g, divisor, value=-1.0)
        return
    shifted = torch.addcdiv(w, g, divisor, value=-1.0)
    z.copy_(torch.where(w == 0, z + g, (shifted * divisor + group["l1"] * w.sign()).neg_()))
    w.copy_(torch.where(shifted * w > 0, shifted, softshrink(z, group["l1"]).div_(divisor).neg_()))
