"""What all clients of a federation and its server agree on before anything is sent, and what follows for one round."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from verbund.errors import InputError
from verbund.exchange.federated.secure.neighbourhood import Neighbourhood, neighbourhood
from verbund.exchange.federated.secure.shamir import MOST_POINTS
from verbund.job.federated_privacy import Secure

WIDEST = 62


@dataclass(frozen=True)
class Terms:
    """Each client has these from its own settings and takes part in no round under others.

    Args:
        federation: its name; keys of one federation are of no use in another.
        settings: the section `secure` of the job.
        length: elements of the vector.
        headroom: what noise may add to the sum of the integers, or take away: see `privacy.distributed`.
    """

    federation: str
    settings: Secure
    length: int
    headroom: int = 0

    def digest(self) -> str:
        """What the server names the terms by."""
        return hashlib.sha256(_canonical({**asdict(self), "settings": self.settings.model_dump()})).hexdigest()


@dataclass(frozen=True)
class Round:
    """One round.

    Args:
        terms: of the federation.
        number: rises from round to round.
        cohort: the names of its clients, sorted. A client's number is its place here.

    Raises:
        InputError: if so many clients, weights and bits need more than 62 bits, or there are too few or too many
            clients.
    """

    terms: Terms
    number: int
    cohort: tuple[str, ...]

    def __post_init__(self) -> None:
        if list(self.cohort) != sorted(set(self.cohort)):
            raise ValueError("a cohort is sorted, and nobody is in it twice")
        if self.size < self.terms.settings.minimum:
            raise InputError(
                f"a round of {self.size} clients; secure aggregation is set to need {self.terms.settings.minimum}",
                where="strategy.exchange.secure.minimum",
                fix="Let more clients take part",
            )
        if self.near.degree + 1 > MOST_POINTS:
            raise InputError(
                f"a client's secrets are divided among {MOST_POINTS} at most, here {self.near.degree + 1}",
                where="strategy.exchange.secure.neighbours",
                fix="Set `secure.neighbours` to a number, or have smaller cohorts",
            )
        if self.bits > WIDEST:
            raise InputError(
                f"the sum of {self.size} clients of weight up to {self.terms.settings.max_weight} needs {self.bits} "
                f"bits, over {WIDEST}",
                where="strategy.exchange.secure",
                fix="Lower `secure.bits` or `secure.max_weight`",
            )

    @property
    def size(self) -> int:
        """Clients of the cohort."""
        return len(self.cohort)

    @property
    def least(self) -> int:
        """With how many clients the round succeeds."""
        return max(2, math.ceil(self.terms.settings.threshold * self.size - 1e-9))

    @cached_property
    def near(self) -> Neighbourhood:
        """How many neighbours a client draws, and how many shares give a secret back."""
        settings = self.terms.settings
        return neighbourhood(self.size, self.least, settings.colluding, settings.neighbours)

    @property
    def complete(self) -> bool:
        """Whether everybody is everybody's neighbour."""
        return self.near.degree == self.size - 1

    @property
    def bits(self) -> int:
        """Bits of an element: the sum is taken modulo 2 to the power of this, and is always less.

        R = n · weight · (2^bits − 1) + 1 values, as in Bonawitz et al., section 7, and room for noise on either side.
        """
        settings = self.terms.settings
        values: int = self.size * settings.max_weight * ((1 << settings.bits) - 1) + 1 + 2 * self.terms.headroom
        return max(1, (values - 1).bit_length())

    @property
    def word(self) -> np.dtype[Any]:
        """The type of an element while it is masked."""
        return np.dtype(np.uint32 if self.bits <= 32 else np.uint64)

    @cached_property
    def context(self) -> bytes:
        """32 bytes that every key and signature of the round depends on."""
        said = {"terms": self.terms.digest(), "round": self.number, "cohort": list(self.cohort)}
        return hashlib.sha256(_canonical(said)).digest()


def _canonical(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


Step = Literal["advertise", "shares", "masked", "consent", "reveal"]
"""What a client sends, in this order."""
STEPS: Sequence[Step] = ("advertise", "shares", "masked", "consent", "reveal")
