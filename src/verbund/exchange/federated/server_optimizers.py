"""Rules that take a step along the weighted mean of the updates: averaging, and the optimisers of a server."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from verbund.exchange.federated.rule import SumRule, Sums, moved


class Averaging(SumRule):
    """FedAvg (McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", 2017,
    algorithm 1), with a rate of the server's: x ← x + η · Σ wᵢ Δᵢ / Σ wᵢ.

    Args:
        rate: η; with 1 the parameters become the mean of the clients'.
        plain: see `SumRule`.
    """

    def __init__(self, rate: float = 1.0, plain: Sequence[str] = ()) -> None:
        super().__init__(plain)
        self.rate = rate

    def apply(self, parameters: Mapping[str, Tensor], sums: Sums) -> dict[str, Tensor]:
        return {
            name: moved(values, sums.mean(name), 1.0 if name in self.plain else self.rate)
            for name, values in parameters.items()
        }


class _Stateful(Averaging):
    """A server optimiser with moments, float64, by name."""

    def __init__(self, rate: float, plain: Sequence[str]) -> None:
        super().__init__(rate, plain)
        self._moments: dict[str, Tensor] = {}

    def apply(self, parameters: Mapping[str, Tensor], sums: Sums) -> dict[str, Tensor]:
        return {
            name: moved(values, sums.mean(name))
            if name in self.plain
            else moved(values, self._direction(name, sums.mean(name)), self.rate)
            for name, values in parameters.items()
        }

    @abstractmethod
    def _direction(self, name: str, difference: Tensor) -> Tensor:
        """What a step is taken along, of the clients' mean difference."""

    def _moment(self, kind: str, name: str, like: Tensor, first: float = 0.0) -> Tensor:
        return self._moments.setdefault(f"{kind}/{name}", torch.full_like(like, first))

    def state(self) -> dict[str, Tensor]:
        return dict(self._moments)

    def load(self, state: Mapping[str, Tensor]) -> None:
        self._moments = {name: values.clone() for name, values in state.items()}


class Momentum(_Stateful):
    """FedAvgM (Hsu et al., "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
    Classification", 2019, section 4.3): m ← β·m + Δ; x ← x + η·m.

    Args:
        rate: η.
        momentum: β.
        plain: see `SumRule`.
    """

    def __init__(self, rate: float, momentum: float, plain: Sequence[str] = ()) -> None:
        super().__init__(rate, plain)
        self._momentum = momentum

    def _direction(self, name: str, difference: Tensor) -> Tensor:
        return self._moment("m", name, difference).mul_(self._momentum).add_(difference)


class Adaptive(_Stateful):
    """FedAdagrad, FedAdam, FedYogi (Reddi et al., "Adaptive Federated Optimization", 2021, algorithm 2):

        m ← β₁·m + (1 − β₁)·Δ        x ← x + η · m / (√v + τ)
        v ← v + Δ²                                (FedAdagrad)
        v ← β₂·v + (1 − β₂)·Δ²                    (FedAdam)
        v ← v − (1 − β₂)·Δ²·sign(v − Δ²)          (FedYogi)

    with v = τ² in the beginning and, as there, no correction of the first steps' bias.

    Args:
        kind: `fedadagrad`, `fedadam` or `fedyogi`.
        rate: η.
        momentum: β₁.
        second: β₂.
        adaptivity: τ.
        plain: see `SumRule`.
    """

    def __init__(
        self, kind: str, rate: float, momentum: float, second: float, adaptivity: float, plain: Sequence[str] = ()
    ) -> None:
        super().__init__(rate, plain)
        self._kind, self._momentum, self._second, self._adaptivity = kind, momentum, second, adaptivity

    def _direction(self, name: str, difference: Tensor) -> Tensor:
        m = self._moment("m", name, difference).lerp_(difference, 1.0 - self._momentum)
        v = self._moment("v", name, difference, self._adaptivity**2)
        square = difference.square()
        if self._kind == "fedadagrad":
            v.add_(square)
        elif self._kind == "fedadam":
            v.lerp_(square, 1.0 - self._second)
        else:
            v.sub_((v - square).sign_().mul_(square), alpha=1.0 - self._second)
        return m / (v.sqrt() + self._adaptivity)
