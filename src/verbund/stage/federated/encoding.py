"""What a client's processes make of an update before it is masked: whole numbers, clipped and with a share of noise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from verbund.errors import RunFailed
from verbund.exchange.federated.protection import ProtectedSums, Protection
from verbund.exchange.federated.screening import Refused, Screening
from verbund.exchange.federated.secure.terms import Terms
from verbund.exchange.federated.update import Update
from verbund.job import Exchange


class Encoding:
    """That of a round with so many clients.

    Args:
        exchange: the job's settings.
        shared: what a client contributes differences of, by name.
        round_: its number.
        clients: how many there are in it.
        clip: the clipping norm of the round, if the server tells one.

    Raises:
        InputError: if there are too few clients, or the numbers do not go together.
    """

    def __init__(
        self, exchange: Exchange, shared: Mapping[str, Tensor], round_: int, clients: int, clip: float | None = None
    ) -> None:
        shapes = {name: tuple(values.shape) for name, values in shared.items()}
        self._screening = Screening(exchange.rule, shared, {})
        self._protection = Protection(exchange, shapes, clients, None, None)
        if self._protection.central is not None and clip is not None:
            self._protection.central.clip = clip
        self._sums = ProtectedSums(self._protection, round_, range(clients))

    @property
    def terms(self) -> Terms:
        """Length and headroom of what is masked."""
        return self._sums.terms

    def weight(self, samples: float) -> int:
        """What a client of so many samples counts."""
        return self._protection.weight(samples)

    def checked(self, update: Update) -> Update:
        """An update that can be added up under masks, no longer than the rule allows.

        Raises:
            InputError: if a value is beyond the range of secure aggregation.
            RunFailed: if it cannot be used for another reason.
        """
        try:
            update = self._screening.checked(update)
        except Refused as refused:
            raise RunFailed(f"the update cannot be used: {refused}") from None
        self.integers(update.difference, update.weight)
        return update

    def integers(self, difference: Mapping[str, Tensor], samples: float) -> tuple[NDArray[np.int64], int]:
        """See `ProtectedSums.encoded`; noise is nobody's to know."""
        return self._sums.encoded("", difference, samples)

    def beyond_budget(self, released: int) -> str | None:
        """What is said if a client that has sent so many vectors with noise must send no other one; else None.

        Each client counts itself: it need not believe the server's account.
        """
        protection, accountant = self._protection, self._protection.accountant
        if protection.privacy.kind != "distributed" or accountant is None:
            return None
        event = protection.event(len(self._sums.cohort))
        accountant.load([{"event": event.record(), "count": released}])
        return None if accountant.affords(event) else accountant.statement()


def as_bytes(integers: NDArray[np.int64]) -> bytes:
    """Whole numbers as they lie in a file: little-endian, 8 bytes each."""
    return integers.astype("<i8").tobytes()


def encoded(encoding: Encoding, difference: Mapping[str, Tensor], samples: float) -> tuple[bytes, dict[str, Any]]:
    """The file that is masked, and what the client needs to know of it."""
    integers, counted = encoding.integers(difference, samples)
    terms = encoding.terms
    return as_bytes(integers), {"weight": counted, "length": terms.length, "headroom": terms.headroom}
