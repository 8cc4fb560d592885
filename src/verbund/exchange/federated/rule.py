"""How a server makes new parameters of a round's updates: the contract that every rule keeps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

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
