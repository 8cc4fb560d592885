"""How a server makes new parameters of a round's updates: the contract that every rule keeps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from verbund.exchange.federated.update import Update


class Rule(ABC):
    """One way of aggregation, with the state that it keeps between rounds."""

    sees_each: ClassVar[bool] = False
    """Whether it needs single updates, which under secure aggregation nobody sees; otherwise sums are enough."""

    def told(self) -> Mapping[str, Tensor]:
        """What clients get besides the parameters, by name; for most rules nothing."""
        return {}

    @abstractmethod
    def step(self, parameters: Mapping[str, Tensor], updates: Sequence[Update]) -> dict[str, Tensor]:
        """The next parameters; the given ones stay as they are. The order of the updates does not matter beyond
        rounding; who calls it sorts them by client, so that the result is the same bit for bit."""

    def state(self) -> dict[str, Tensor]:
        """What must survive the server's end, by name."""
        return {}

    def load(self, state: Mapping[str, Tensor]) -> None:  # noqa: B027 (most rules have no state)
        """Takes up what `state` gave."""


class Sums:
    """Weighted sums of what clients contribute, by name, in float64: added in one order they are the same bit for bit
    however a cohort is divided."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.weight = 0.0
        self.count = 0
        """Of the updates that were added."""

    @torch.no_grad()
    def add(self, contribution: Mapping[str, Tensor], weight: float) -> None:
        """Adds one client's contribution, `weight` times."""
        for name, values in contribution.items():
            if (total := self.tensors.get(name)) is None:
                self.tensors[name] = values.to(torch.float64, copy=True).mul_(weight)
            else:
                total.add_(values, alpha=weight)
        self.weight += weight
        self.count += 1

    def mean(self, name: str) -> Tensor:
        """The weighted mean of what clients contributed under a name, float64."""
        return self.tensors[name] / self.weight


class SumRule(Rule):
    """A rule that needs nothing but the weighted sums of what each client contributes: these can be added up as
    updates come, in any number of processes, and under secure aggregation.

    Args:
        plain: names that are averaged as they are, such as running statistics; an optimiser is not for them.
    """

    def __init__(self, plain: Sequence[str] = ()) -> None:
        self.plain = frozenset(plain)

    def contribution(self, update: Update) -> Mapping[str, Tensor]:
        """What of an update is added up, by name; not yet multiplied by its weight."""
        return update.difference

    @abstractmethod
    def apply(self, parameters: Mapping[str, Tensor], sums: Sums) -> dict[str, Tensor]:
        """The next parameters, from the sums over a round's clients."""

    def step(self, parameters: Mapping[str, Tensor], updates: Sequence[Update]) -> dict[str, Tensor]:
        sums = Sums()
        for update in updates:
            sums.add(self.contribution(update), update.weight)
        return self.apply(parameters, sums)


def moved(parameter: Tensor, difference: Tensor, rate: float = 1.0) -> Tensor:
    """`parameter + rate · difference`, computed in float64 and rounded once."""
    return (parameter.double() + rate * difference.double()).to(parameter.dtype)
