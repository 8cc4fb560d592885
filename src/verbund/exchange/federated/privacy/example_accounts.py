"""What each client has spent on its own samples under DP-SGD. As no sample is two clients', nothing is added up over
clients: what holds for all is the largest."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from verbund.errors import InputError
from verbund.exchange.federated.privacy.accountant import Accountant, noise_for
from verbund.exchange.federated.privacy.event import Event
from verbund.job import Privacy

PROTECTS = (
    "whether any one sample of any client is used or left out (its gradient zero; how many samples a client has is "
    "taken as known; this is the client with the largest ε)"
)


class ExampleAccounts:
    """The accounts of a federation's clients.

    Args:
        settings: the section `privacy`.
        rounds: by client what a step of its costs, and how many a round has.
    """

    def __init__(self, settings: Privacy, rounds: Sequence[tuple[Event, int]]) -> None:
        self._settings, self._rounds = settings, rounds
        self._accounts: dict[int, Accountant] = {}

    def affords(self, client: int) -> bool:
        """Whether another round of a client stays within its budget."""
        if self._settings.budget is None:
            return True
        return self._of(client).affords(*self._rounds[client])

    def spend(self, cohort: Sequence[int]) -> None:
        """Records a round of these clients.

        Raises:
            BudgetSpent: if one cannot afford it.
        """
        for client in cohort:
            account = self._accounts.setdefault(client, self._of(client))
            account.spend(*self._rounds[client])

    def worst(self) -> Accountant:
        """The account of the client whose ε is largest; an empty one if none has trained."""
        candidates = _most(list(self._accounts.values()))
        return max(candidates, key=lambda each: each.spent().epsilon, default=self._new())

    def outlook(self, rounds: int, share: float) -> str | None:
        """What to expect of the budget, a sentence; None if it is enough for all.

        Args:
            rounds: that are still to come.
            share: of them that a client takes part in on average.

        Raises:
            InputError: if no client can afford one round.
        """
        if self._settings.budget is None or rounds < 1:
            return None
        event, steps = max(set(self._rounds), key=lambda each: ((each[0].rate or 1.0) ** 2 * each[1], each[1]))
        expected = math.ceil(rounds * share)
        if not any(self.affords(client) for client in _first_of_each(self._rounds)):
            needed = noise_for(self._settings.budget, self._settings.delta, steps * expected, event.rate)
            raise InputError(
                f"the privacy budget of {self._settings.budget:g} is not enough for one round of any client",
                where="strategy.exchange.privacy.budget",
                fix=f"`privacy.noise` of about {needed:.2g} would be enough for {expected} rounds of each",
            )
        if self._accounts:
            return None  # it was told when the training began
        enough = self._new().left(event, steps * expected) // steps
        if enough >= expected:
            return None
        needed = noise_for(self._settings.budget, self._settings.delta, steps * expected, event.rate)
        return (
            f"The privacy budget of {self._settings.budget:g} is enough for {enough} rounds of a client with steps at "
            f"rate {event.rate:.3g}, and it would take part in about {expected}: clients whose budget is spent train "
            f"no more; `privacy.noise` of about {needed:.2g} would be enough for all"
        )

    def state(self) -> dict[str, Any]:
        """What must survive, as plain JSON values."""
        return {str(client): account.state() for client, account in sorted(self._accounts.items())}

    def load(self, state: Mapping[str, Any]) -> None:
        """Takes up what `state` gave."""
        for client, spent in state.items():
            account = self._accounts[int(client)] = self._new()
            account.load(spent)

    def _of(self, client: int) -> Accountant:
        return self._accounts.get(client) or self._new()

    def _new(self) -> Accountant:
        return Accountant(self._settings.delta, self._settings.budget, PROTECTS)


def _most(accounts: Sequence[Accountant]) -> list[Accountant]:
    """Those that no other surpasses in rate and steps: only they can have the largest ε."""
    kept: dict[str, Accountant] = {}
    best: dict[float, list[tuple[float, int]]] = {}
    single: list[tuple[float, float, int, Accountant]] = []
    for account in accounts:
        spent = account.state()
        if len(spent) == 1 and "rate" in spent[0]["event"]:
            event = spent[0]["event"]
            single.append((float(event["noise"]), float(event["rate"]), int(spent[0]["count"]), account))
        else:
            kept[repr(spent)] = account
    for noise, rate, count, account in sorted(single, key=lambda each: (each[0], -each[1], -each[2])):
        before = best.setdefault(noise, [])
        if not any(count <= other for _, other in before):
            before.append((rate, count))
            kept[repr((noise, rate, count))] = account
    return list(kept.values())


def _first_of_each(rounds: Sequence[tuple[Event, int]]) -> list[int]:
    """A client of each kind of round."""
    found: dict[tuple[Event, int], int] = {}
    for client, kind in enumerate(rounds):
        found.setdefault(kind, client)
    return list(found.values())
