"""What becomes of a round's contributions where there is privacy or secure aggregation, whoever plays the round.

A simulation adds up the same integers modulo the same power of two as the protocol, without masks, which cancel out:
its numbers are those of the protocol bit for bit. Its noise is a function of the job's seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verbund.errors import InputError
from verbund.exchange.federated.privacy import Accountant, CentralPrivacy, DistributedPrivacy, LocalPrivacy
from verbund.exchange.federated.privacy.accountant import noise_for
from verbund.exchange.federated.rule import Sums
from verbund.exchange.federated.secure.fixed_point import FixedPoint, as_integers, as_words
from verbund.exchange.federated.secure.layout import Layout
from verbund.exchange.federated.secure.terms import Round, Terms
from verbund.job import Exchange


class Protection:
    """A federation's privacy and secure aggregation, and what it has spent.

    Args:
        exchange: the settings.
        shapes: of what clients contribute, by name.
        cohort: clients of a round; under Poisson sampling their mean.
        rate: under Poisson sampling the probability with which each client joins a round; else None.
        seed: of a simulation; None: noise and roundings are nobody's to know.

    Raises:
        InputError: if a package is missing or the numbers do not go together.
    """

    def __init__(
        self,
        exchange: Exchange,
        shapes: Mapping[str, tuple[int, ...]],
        cohort: int,
        rate: float | None,
        seed: int | None,
    ) -> None:
        self.privacy, self.secure = exchange.privacy, exchange.secure
        self._by_samples = exchange.rule.by_samples and not exchange.privacy.of_updates
        self._seed, self.cohort, self.rate = seed, cohort, rate
        self.layout = Layout(dict(shapes))
        self.central: CentralPrivacy | None = None
        self.local: LocalPrivacy | None = None
        self.accountant: Accountant | None = None
        self._times: dict[int, int] = {}  # under local privacy: how often each client has sent something
        if self.privacy.kind == "central":
            self.central = CentralPrivacy(self.privacy, self.cohort, self.rate, seed)
            self._account(self.central.protects)
        elif self.privacy.kind == "local":
            self.local = LocalPrivacy(self.privacy, seed)
            self._account(LocalPrivacy.protects)
        elif self.privacy.kind == "distributed":
            self._account(DistributedPrivacy.protects)
            self._shares(self.cohort)
        if self.secure is not None and self.privacy.kind != "distributed":
            self._round(0, self.cohort, 0)

    def weight(self, weight: float) -> int:
        """What a client counts under secure aggregation: its samples, capped, as a whole number that all may know."""
        assert self.secure is not None
        return min(max(round(weight), 1), self.secure.max_weight) if self._by_samples else 1

    @property
    def known(self) -> list[int]:
        """Under local privacy: the clients that have sent something."""
        return list(self._times)

    def affords(self, cohort: Sequence[int]) -> bool:
        """Whether a round of these clients stays within the budget."""
        if self.accountant is None:
            return True
        if self.local is not None:
            return not self._most(cohort) or self.accountant.affords(self.local.event)
        return self.accountant.affords(self.event(len(cohort)))

    def outlook(self, rounds: int) -> str | None:
        """What to expect of the budget, a sentence; None if it is enough for so many more rounds.

        Raises:
            InputError: if it is not enough for the first one.
        """
        if self.accountant is None or self.accountant.budget is None:
            return None
        event = self.local.event if self.local is not None else self.event(self.cohort)
        enough = self.accountant.left(event, rounds)
        if enough == rounds:
            return None
        who = " of one client" if self.local is not None else ""
        text = f"he privacy budget of {self.accountant.budget:g} is enough for {enough} of {rounds} rounds{who}"
        if self.accountant.releases:
            return f"T{text}"
        factor = 2.0 if self.local is not None else 1.0  # see its event
        needed = factor * noise_for(self.accountant.budget, self.accountant.delta, rounds, self.rate)
        advice = f"`privacy.noise` of about {needed:.2g} would be enough for all"
        if not enough:
            raise InputError(f"t{text}", where="strategy.exchange.privacy.budget", fix=advice)
        return f"T{text}; {advice}"

    def begin(self, number: int, cohort: Sequence[int]) -> ProtectedSums:
        """The sums of a round, whose cost is spent herewith.

        Raises:
            BudgetSpent: if there is not enough left.
            InputError: if secure aggregation cannot have so many, or so few.
        """
        if self.accountant is not None:
            if self.local is None:
                self.accountant.spend(self.event(len(cohort)))
            elif self._most(cohort):
                self.accountant.spend(self.local.event)
            for client in cohort if self.local is not None else ():
                self._times[client] = self._times.get(client, 0) + 1
        return ProtectedSums(self, number, cohort)

    def state(self) -> dict[str, Any]:
        """What must survive, as plain JSON values."""
        return {
            "kind": self.privacy.kind,
            "spent": self.accountant.state() if self.accountant else [],
            "central": self.central.state() if self.central else {},
            "times": {str(client): times for client, times in self._times.items()},
        }

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Takes up what `state` gave; None: there was no protection.

        Raises:
            InputError: if it is of another kind of privacy, so that what was spent cannot be counted on.
        """
        before = state["kind"] if state is not None else "none"
        if state is None or before != self.privacy.kind:
            if self.privacy.kind == "none":
                return
            raise InputError(
                f"the run had the privacy `{before}` and now has `{self.privacy.kind}`: what it has spent would "
                "not be told",
                where="strategy.exchange.privacy.kind",
                fix="Leave it as it was, or begin anew",
            )
        if self.accountant is not None:
            self.accountant.load(state["spent"])
        if self.central is not None:
            self.central.load(state["central"])
        self._times = {int(client): times for client, times in state["times"].items()}

    def _account(self, protects: str) -> None:
        self.accountant = Accountant(self.privacy.delta, self.privacy.budget, protects)

    def event(self, cohort: int) -> Any:
        """What a round of so many clients costs, but under local privacy."""
        return self.central.event if self.central is not None else self._shares(cohort).event

    def _most(self, cohort: Sequence[int]) -> bool:
        """Whether the client that has sent most often sends once more: ε is that of such a client."""
        most = max(self._times.values(), default=0)
        return any(self._times.get(client, 0) == most for client in cohort)

    def _shares(self, cohort: int) -> DistributedPrivacy:
        assert self.secure is not None
        least = self._round(0, cohort, 0).least
        return DistributedPrivacy(self.privacy, self.secure, self.layout.length, cohort, least, self._seed)

    def _round(self, number: int, cohort: int, headroom: int) -> Round:
        assert self.secure is not None
        length = self.layout.length + (self.central is not None)
        names = tuple(f"{client:010}" for client in range(cohort))
        return Round(Terms("", self.secure, length, headroom), number, names)


class ProtectedSums:
    """The sums of one round.

    Args:
        protection: of the federation.
        number: of the round.
        cohort: its clients.
    """

    def __init__(self, protection: Protection, number: int, cohort: Sequence[int]) -> None:
        self._protection, self._number, self.cohort = protection, number, cohort
        self._plain = Sums()
        self._unclipped, self._present = 0.0, 0
        self._shares: DistributedPrivacy | None = None
        self._round: Round | None = None
        if protection.secure is not None:
            if protection.privacy.kind == "distributed":
                self._shares = protection._shares(len(cohort))
            headroom = self._shares.headroom if self._shares else 0
            self._round = protection._round(number, len(cohort), headroom)
            self._words = np.zeros(self._round.terms.length, self._round.word)
            self._weight = 0
            secure = protection.secure
            self._fixed = FixedPoint(secure.bits, secure.range, secure.rounding)

    def add(self, client: int, contribution: Mapping[str, Tensor], weight: float) -> None:
        """Takes what a client contributes, `weight` times.

        Raises:
            InputError: if a value is beyond the range of secure aggregation; it names the client.
        """
        protection = self._protection
        if protection.local is not None:
            local = LocalPrivacy(protection.privacy, protection._seed, str(client))
            contribution = local.protected(contribution, self._number)
        if self._round is not None:
            try:
                integers, counted = self.encoded(str(client), contribution, weight)
            except InputError as error:
                raise InputError(error.what, where=f"client {client}, {error.where}", fix=error.fix) from None
            self._words += as_words(integers, self._round.word)
            self._weight += counted
            self._present += 1
            return
        if protection.central is not None:
            contribution, inside = protection.central.clipped(contribution)
            self._unclipped += inside
        self._present += 1
        self._plain.add(contribution, 1.0)  # under privacy all count the same

    def encoded(
        self, client: str, contribution: Mapping[str, Tensor], weight: float
    ) -> tuple[np.ndarray[Any, Any], int]:
        """What a client masks: its contribution, clipped, rounded and with its share of noise, times what it counts.

        Args:
            client: its name, for simulations.
            contribution: by name.
            weight: what it would count without secure aggregation.

        Returns:
            whole numbers, int64 [`terms.length`], and what it counts.

        Raises:
            InputError: if a value is beyond the range of secure aggregation.
        """
        protection, inside = self._protection, False
        if protection.central is not None:
            contribution, inside = protection.central.clipped(contribution)
        integers = self._integers(protection.layout.join(contribution), client)
        if protection.central is not None:
            integers = np.append(integers, int(inside))
        counted = protection.weight(weight)
        return integers * counted, counted

    @property
    def terms(self) -> Terms:
        """Length and headroom of what is masked, for the terms of secure aggregation."""
        assert self._round is not None
        return self._round.terms

    def take(self, integers: np.ndarray[Any, Any], weight: int, present: int) -> None:
        """Takes the sum that secure aggregation has come to, in place of what single clients contribute.

        Args:
            integers: int64 [`terms.length`].
            weight: the sum of what the clients count that are in it.
            present: how many these are.
        """
        assert self._round is not None
        self._words = as_words(integers, self._round.word)
        self._weight, self._present = weight, present

    def close(self) -> Sums:
        """The sums as the server gets them, with their noise.

        Raises:
            InputError: if fewer clients are there than secure aggregation needs.
        """
        protection = self._protection
        if self._round is not None:
            if self._present < self._round.least:
                raise InputError(
                    f"{self._present} clients of the {self._round.size} of round {self._number} could be used, "
                    f"{self._round.least} are needed",
                    where="strategy.exchange.secure.threshold",
                    fix="Nothing was revealed of their updates",
                )
            self._plain = self._unmasked()
        if protection.central is None:
            return self._plain
        total = self._plain.tensors or {
            name: torch.zeros(shape, dtype=torch.float64) for name, shape in protection.layout.shapes.items()
        }
        released = Sums()
        released.add(protection.central.release(total, self._unclipped, self._present, self._number), 1.0)
        return released

    def _integers(self, vector: np.ndarray[Any, Any], client: str) -> np.ndarray[Any, Any]:
        layout = self._protection.layout
        if self._shares is not None:
            return self._shares.integers(vector, client, self._number, layout)
        from verbund.exchange.federated.privacy.noise import source

        rounded: np.ndarray[Any, Any] = self._fixed.round(
            vector, layout, source(self._protection._seed, "rounding", client, self._number)
        )
        return rounded

    def _unmasked(self) -> Sums:
        assert self._round is not None
        bits = self._round.bits
        words = self._words & self._words.dtype.type((1 << bits) - 1)
        total = as_integers(words, bits)
        layout = self._protection.layout
        if self._protection.central is not None:
            self._unclipped = float(total[-1])
            total = total[:-1]
        sums = Sums()
        split = layout.split(total.astype(np.float64) * self._fixed.step)
        sums.tensors = {name: torch.from_numpy(np.array(values)) for name, values in split.items()}
        sums.weight, sums.count = float(self._weight), self._present
        return sums
