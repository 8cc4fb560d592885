"""Central differential privacy: the sum of clipped updates, with noise that the server adds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from verbund.exchange.federated.privacy.clipping import clipped, followed, split_noise
from verbund.exchange.federated.privacy.event import Event
from verbund.exchange.federated.privacy.noise import gaussian, source
from verbund.job.federated_privacy import Privacy


class CentralPrivacy:
    """What the server does with each round's updates (McMahan et al., "Learning Differentially Private Recurrent
    Language Models", ICLR 2018).

    Args:
        settings: the section `privacy`.
        clients: the mean size of a round's cohort, a constant: by it sums are divided. How many have come is not
            told, as it would tell who has.
        rate: under `sampling = "poisson"` the probability with which each client joined; else None.
        seed: None but in simulations: see `noise.source`.
    """

    def __init__(self, settings: Privacy, clients: float, rate: float | None = None, seed: int | None = None) -> None:
        if (rate is not None) != (settings.sampling == "poisson"):
            raise ValueError("a rate is for Poisson sampling, and for that alone")
        self.settings, self._clients, self._rate, self._seed = settings, clients, rate, seed
        self.clip = settings.clip
        """The norm to which this round's updates are shortened; clients are told it."""

    @property
    def protects(self) -> str:
        """Whom, for the accountant."""
        if self._rate is not None:
            return "whether one client is among those that take part (add or remove one)"
        return "whether one client's updates are used or left out (all zero)"

    @property
    def event(self) -> Event:
        """What a round costs: the noise on the count is part of it."""
        return Event(noise=self.settings.noise, rate=self._rate)

    @property
    def count_noise(self) -> float:
        """Adaptive clipping: standard deviation of the noise on the count; the paper has cohort / 20."""
        given = self.settings.count_noise
        return given if given is not None else max(self._clients / 20.0, self.settings.noise)

    @property
    def multiplier(self) -> float:
        """Standard deviation of the noise on the sum, as a multiple of `clip`."""
        noise = self.settings.noise
        return split_noise(noise, self.count_noise) if self.settings.adaptive else noise

    def clipped(self, difference: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], bool]:
        """A client's contribution to the sum, and whether it was no longer than `clip` before."""
        return clipped(difference, self.clip)

    @torch.no_grad()
    def release(self, total: Mapping[str, Tensor], unclipped: float, present: float, round_: int) -> dict[str, Tensor]:
        """The noisy mean of a round. Spend `event` first. With adaptive clipping the norm changes for the next round.

        Args:
            total: the sum of the clipped updates, by name.
            unclipped: how many of them were no longer than `clip`.
            present: how many there were.
            round_: its number, for simulations.
        """
        means = {}
        for name in sorted(total):
            values = total[name]
            noise = gaussian(source(self._seed, "central", round_, name), values.numel())
            noisy = values.double() + torch.from_numpy(noise).reshape(values.shape) * (self.multiplier * self.clip)
            means[name] = (noisy / self._clients).to(values.dtype)
        if self.settings.adaptive:
            error = float(gaussian(source(self._seed, "count", round_), 1)[0]) * self.count_noise
            share = (unclipped - present / 2.0 + error) / self._clients + 0.5
            self.clip = followed(self.clip, share, self.settings.quantile, self.settings.clip_rate)
        return means

    def state(self) -> dict[str, Any]:
        """What must survive the server's end, as plain JSON values."""
        return {"clip": self.clip}

    def load(self, state: Mapping[str, Any]) -> None:
        """Takes up what `state` gave."""
        self.clip = float(state["clip"])
