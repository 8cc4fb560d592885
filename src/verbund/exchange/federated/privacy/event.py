"""One release of something that was computed from private data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Event:
    """What a release costs.

    Args:
        noise: standard deviation of its Gaussian noise as a multiple of the L2 sensitivity; None where `rho` says it.
        rate: the probability of the Poisson sampling that was really done before it; None: none was, and no
            amplification by sampling is claimed.
        rho: the release is ρ-zero-concentrated differentially private.

    Raises:
        ValueError: if the numbers make no sense.
    """

    noise: float | None = None
    rate: float | None = None
    rho: float | None = None

    def __post_init__(self) -> None:
        if (self.noise is None) == (self.rho is None) or (self.rho is not None and self.rate is not None):
            raise ValueError("an event has noise, sampled or not, or ρ")
        for name, value, most in (("noise", self.noise, None), ("rho", self.rho, None), ("rate", self.rate, 1.0)):
            if value is not None and not (value > 0.0 and (most is None or value <= most)):
                raise ValueError(f"an event with a {name} of {value}")

    def record(self) -> dict[str, Any]:
        """The event as plain JSON values; `Event(**record)` makes it again."""
        return {key: value for key, value in asdict(self).items() if value is not None}
