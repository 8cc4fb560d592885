"""SCAFFOLD: control variates take away what drives heterogeneous clients apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from verbund.exchange.federated.rule import Sums, moved
from verbund.exchange.federated.server_optimizers import Averaging
from verbund.exchange.federated.update import Update

CONTROL = "control/"
"""Before the name of a parameter that a control variate belongs to."""


class Scaffold(Averaging):
    """The server of SCAFFOLD (Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning",
    2020, algorithm 1):

        x ← x + η · mean Δyᵢ        c ← c + |S| / N · mean Δcᵢ

    Clients count all alike. Clients are told c; their part is `controls` and `new_control`.

    Args:
        clients: N.
        trained: names and shapes are those of these parameters; others are averaged.
        rate: η.
    """

    def __init__(
        self, clients: int, trained: Mapping[str, Tensor], rate: float = 1.0, plain: Sequence[str] = ()
    ) -> None:
        super().__init__(rate, plain)
        self._clients = clients
        self._controls = {f"{CONTROL}{name}": torch.zeros_like(values) for name, values in trained.items()}

    def told(self) -> Mapping[str, Tensor]:
        return self._controls

    def contribution(self, update: Update) -> Mapping[str, Tensor]:
        return {**update.difference, **{name: update.aux[name] for name in self._controls}}

    def apply(self, parameters: Mapping[str, Tensor], sums: Sums) -> dict[str, Tensor]:
        share = sums.count / self._clients
        self._controls = {name: moved(control, sums.mean(name), share) for name, control in self._controls.items()}
        return super().apply(parameters, sums)

    def state(self) -> dict[str, Tensor]:
        return dict(self._controls)

    def load(self, state: Mapping[str, Tensor]) -> None:
        self._controls = {name: values.clone() for name, values in state.items()}


def new_control(own: Tensor, common: Tensor, difference: Tensor, steps: int, rate: float) -> Tensor:
    """A client's control variate after its local steps, by option II (algorithm 1, line 12):
    cᵢ⁺ = cᵢ − c + (x − yᵢ) / (K·η_l).

    Args:
        own: cᵢ.
        common: c.
        difference: yᵢ − x.
        steps: K.
        rate: η_l, of plain SGD.
    """
    return own - common - difference / (steps * rate)
