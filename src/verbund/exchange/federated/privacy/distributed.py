"""Distributed differential privacy: each client adds a share of the noise to its integers, and the server sees the sum.

After Kairouz, Liu, Steinke, "The Distributed Discrete Gaussian Mechanism for Federated Learning with Secure
Aggregation", ICML 2021.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from verbund.errors import InputError
from verbund.exchange.federated.keystream import Keystream
from verbund.exchange.federated.privacy.event import Event
from verbund.exchange.federated.privacy.noise import discrete_gaussian, source
from verbund.exchange.federated.secure.fixed_point import FixedPoint
from verbund.exchange.federated.secure.layout import Layout
from verbund.job.federated_privacy import Privacy, Secure

_HEADROOM = 12.0
"""Standard deviations of all clients' noise together by which the sum may grow: a wrap-around has probability below
2^-100 an element."""
_ATTEMPTS = 1000


class DistributedPrivacy:
    """What each client does with its vector before it is masked.

    Noise is calibrated to the clients that are certainly honest and there: the fewest with which a round succeeds, less
    those that may collude and know their own noise. More clients bring more noise than is accounted for.

    Args:
        privacy: the section `privacy`.
        secure: the section `secure`.
        length: elements of the vector.
        clients: of the cohort.
        least: with how many a round succeeds.
        seed: None but in simulations: see `noise.source`.

    Raises:
        InputError: if steps are too coarse or too fine for the noise, or values could be out of range.
    """

    protects = "whether one client's updates are used or left out (all zero)"

    def __init__(
        self, privacy: Privacy, secure: Secure, length: int, clients: int, least: int, seed: int | None = None
    ) -> None:
        if secure.range < privacy.clip:
            raise InputError(
                f"a clipped update may have values up to {privacy.clip:g}, beyond the range of {secure.range:g}",
                where="strategy.exchange.secure.range",
                fix="Raise it to `privacy.clip`",
            )
        self._clip, self._seed, self._clients = privacy.clip, seed, clients
        self.fixed = FixedPoint(secure.bits, secure.range, secure.rounding)
        self._length, self._noise = length, privacy.noise
        self._honest = least - math.floor(secure.colluding * clients)
        self.sigma = self._noise * self.sensitivity / math.sqrt(self._honest)
        """Standard deviation of one client's noise, in steps."""
        if self._gap * length > 1e-6:
            raise InputError(
                f"one client's noise is {self.sigma:.2g} steps, so coarse that the sum of the clients' noise is not "
                "what is accounted for",
                where="strategy.exchange.secure.bits",
                fix="Raise `secure.bits` or `privacy.noise`",
            )
        discrete_gaussian(Keystream(bytes(32)), self.sigma, 1)  # refuses what is too fine

    @property
    def sensitivity(self) -> float:
        """The largest L2 norm of a clipped and rounded vector, in steps (Kairouz et al., proposition 22)."""
        exact, root = self._clip / self.fixed.step, math.sqrt(self._length)
        if self.fixed.rounding == "nearest":
            return min(exact + root / 2.0, 2.0 * exact)
        # A rounding that comes out longer is drawn anew; with β = e^(−1/2) that happens with probability below it.
        return min(exact + root, math.sqrt(exact**2 + self._length / 4.0 + exact + root / 2.0))

    @property
    def headroom(self) -> int:
        """What the noise may add to the sum: for the terms of secure aggregation."""
        return math.ceil(_HEADROOM * self.sigma * math.sqrt(self._clients))

    @property
    def _gap(self) -> float:
        """τ: how far the sum of discrete Gaussians is from a discrete Gaussian (the same, theorem 1)."""
        squared = 2.0 * math.pi**2 * self.sigma**2
        return 10.0 * sum(math.exp(-squared * k / (k + 1.0)) for k in range(1, self._honest))

    @property
    def event(self) -> Event:
        """What a round costs: ½ε²-concentrated differential privacy (the same, theorem 1)."""
        ratio = self.sensitivity / (math.sqrt(self._honest) * self.sigma)
        epsilon = min(math.sqrt(ratio**2 + self._gap * self._length / 2.0), ratio + self._gap * math.sqrt(self._length))
        return Event(rho=epsilon**2 / 2.0)

    def integers(
        self, vector: NDArray[np.floating], client: str, round_: int, layout: Layout | None = None
    ) -> NDArray[np.int64]:
        """A client's vector, clipped, rounded and with its share of the noise: int64. Spend `event` first.

        Args:
            vector: flat, floating point.
            client: its name, for simulations.
            round_: its number, for simulations.
            layout: whose names say where a wrong value is.

        Raises:
            InputError: if a value is not finite.
        """
        values = np.asarray(vector, np.float64)
        norm = float(np.linalg.norm(values))
        if norm > self._clip:
            values = values * (self._clip / norm * (1.0 - 1e-15))
        for attempt in range(_ATTEMPTS):
            stream = source(self._seed, "rounding", client, round_, attempt)
            rounded: NDArray[np.int64] = self.fixed.round(values, layout, stream)
            if float(np.linalg.norm(rounded.astype(np.float64))) <= self.sensitivity:
                return rounded + discrete_gaussian(source(self._seed, "share", client, round_), self.sigma, len(values))
        raise RuntimeError(f"no rounding of {_ATTEMPTS} was short enough")
