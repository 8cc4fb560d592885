"""How much privacy has been spent, at every moment of a training."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from verbund.errors import RunFailed
from verbund.exchange.federated.privacy.event import Event

if TYPE_CHECKING:
    from dp_accounting import DpEvent

_INTERVAL = 1e-4
"""At which privacy losses are made discrete, always to the worse side: dp-accounting's own."""


class BudgetSpent(RunFailed):
    """The next release would cost more than there is left; nothing was released."""


@dataclass(frozen=True)
class Spent:
    """ε at the accountant's δ, computed in two ways of which each is an upper bound.

    Args:
        rdp: by Rényi differential privacy (Mironov, CSF 2017; Mironov, Talwar, Zhang, 2019 for sampling).
        pld: by privacy-loss distributions (Koskela, Jälkö, Honkela, AISTATS 2020; Doroshenko et al., PETS 2022); None
            where an event has none.
    """

    rdp: float
    pld: float | None

    @property
    def epsilon(self) -> float:
        """The smaller of the two."""
        return self.rdp if self.pld is None else min(self.rdp, self.pld)


class Accountant:
    """Records events, and tells what they cost together. Whoever releases something spends it here first.

    Args:
        delta: δ.
        budget: the largest ε; None: there is no limit.
        protects: whom, and what is not to be told of them: a sentence's object, for the report.
    """

    def __init__(
        self, delta: float, budget: float | None = None, protects: str = "whether one client takes part"
    ) -> None:
        self.delta, self.budget, self.protects = delta, budget, protects
        self._events: Counter[Event] = Counter()

    @property
    def releases(self) -> int:
        """How many there were."""
        return self._events.total()

    def spend(self, event: Event, count: int = 1) -> None:
        """Records so many releases of one kind.

        Raises:
            BudgetSpent: if they would exceed the budget. Nothing is recorded, and nothing may be released.
        """
        if not self.affords(event, count):
            raise BudgetSpent(
                f"the next {'release' if count == 1 else f'{count} releases'} would take ε at δ {self.delta:g} beyond "
                f"the budget of {self.budget:g}; {self.spent().epsilon:.3f} is spent",
                where="strategy.exchange.privacy.budget",
                fix="Training ends with what there is; more noise, fewer rounds or a larger budget would let it go on",
            )
        self._events[event] += count

    def affords(self, event: Event, count: int = 1) -> bool:
        """Whether so many more releases stay within the budget."""
        if self.budget is None:
            return True
        after = self._events + Counter({event: count})
        if _rdp(_sorted(after), self.delta) <= self.budget:
            return True  # the cheap bound is enough
        by_losses = _pld(_sorted(after), self.delta)
        return by_losses is not None and by_losses <= self.budget

    def left(self, event: Event, most: int) -> int:
        """How many more releases of one kind the budget is enough for, up to `most`."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.affords(event, middle) else (low, middle - 1)
        return low

    def spent(self) -> Spent:
        """What all releases cost so far."""
        events = _sorted(self._events)
        return Spent(_rdp(events, self.delta), _pld(events, self.delta))

    def statement(self) -> str:
        """What can be said of the training, in a sentence or two."""
        if not self._events:
            return f"Nothing was released, so nothing is told of {self.protects}."
        spent = self.spent()
        rates = sorted({event.rate for event in self._events if event.rate is not None})
        if len(rates) == 1:
            sampling = f"each was preceded by Poisson sampling at rate {rates[0]:g}, which was done as such"
        elif rates:
            sampling = f"they were preceded by Poisson sampling at rates from {rates[0]:g} to {rates[-1]:g}"
        else:
            sampling = "no amplification by sampling is claimed"
        if rates and any(event.rate is None for event in self._events):
            sampling += ", some of them by none"
        ways = f"Rényi: {spent.rdp:.3f}" + (
            "" if spent.pld is None else f"; privacy-loss distributions: {spent.pld:.3f}"
        )
        return (
            f"({spent.epsilon:.3f}, {self.delta:g})-differential privacy for {self.protects}, after {self.releases} "
            f"release{'s' * (self.releases != 1)}; {sampling}. ε by {ways}."
        )

    def summary(self) -> dict[str, Any]:
        """What a run's summary has of it."""
        spent = self.spent()
        return {
            "epsilon": spent.epsilon,
            "epsilon_rdp": spent.rdp,
            "epsilon_pld": spent.pld,
            "delta": self.delta,
            "budget": self.budget,
            "releases": self.releases,
            "statement": self.statement(),
        }

    def state(self) -> list[dict[str, Any]]:
        """What must survive the process's end, as plain JSON values."""
        return [{"event": event.record(), "count": count} for event, count in _sorted(self._events)]

    def load(self, state: Sequence[dict[str, Any]]) -> None:
        """Takes up what `state` gave, in place of what was recorded."""
        self._events = Counter()
        for item in state:
            if item["count"]:
                self._events[Event(**item["event"])] += item["count"]


def noise_for(epsilon: float, delta: float, releases: int, rate: float | None = None) -> float:
    """The least noise, within a hundredth, with which so many releases cost at most ε by Rényi's bound."""
    low, high = 0.0, 1.0
    while _rdp(((Event(noise=high, rate=rate), releases),), delta) > epsilon:
        low, high = high, high * 2.0
    while high - low > 0.005 * high:
        middle = (low + high) / 2.0
        enough = _rdp(((Event(noise=middle, rate=rate), releases),), delta) <= epsilon
        low, high = (low, middle) if enough else (middle, high)
    return high


def _sorted(events: Counter[Event]) -> tuple[tuple[Event, int], ...]:
    return tuple(sorted(events.items(), key=lambda item: repr(item[0])))


def _dp(event: Event) -> DpEvent:
    import dp_accounting

    if event.rho is not None:
        return dp_accounting.ZCDpEvent(event.rho)
    gaussian = dp_accounting.GaussianDpEvent(event.noise)
    return gaussian if event.rate is None else dp_accounting.PoissonSampledDpEvent(event.rate, gaussian)


@contextmanager
def _quiet() -> Iterator[None]:
    """Within the block dp-accounting does not say which orders it leaves out, without which the bound holds too."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@lru_cache(maxsize=256)
def _rdp(events: tuple[tuple[Event, int], ...], delta: float) -> float:
    from dp_accounting.rdp import RdpAccountant

    if not events:
        return 0.0
    accountant = RdpAccountant()
    with _quiet():
        for event, count in events:
            accountant.compose(_dp(event), count)
    return float(accountant.get_epsilon(delta))


@lru_cache(maxsize=256)
def _pld(events: tuple[tuple[Event, int], ...], delta: float) -> float | None:
    from dp_accounting.pld import PLDAccountant

    if not events:
        return 0.0
    if any(event.rho is not None for event, _ in events):
        return None
    accountant = PLDAccountant(value_discretization_interval=_INTERVAL)
    for event, count in events:
        accountant.compose(_dp(event), count)
    epsilon = float(accountant.get_epsilon(delta))
    return epsilon if math.isfinite(epsilon) else None
