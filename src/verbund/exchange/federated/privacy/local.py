"""Local differential privacy: what leaves a client carries all the noise that protects it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from verbund.exchange.federated.privacy.clipping import clipped
from verbund.exchange.federated.privacy.event import Event
from verbund.exchange.federated.privacy.noise import gaussian, source
from verbund.job.federated_privacy import Privacy


class LocalPrivacy:
    """What a client does with its update.

    Args:
        settings: the section `privacy`.
        seed: None but in simulations: see `noise.source`.
        client: its name, for simulations.
    """

    protects = "what this client's update was (any one in place of any other)"

    def __init__(self, settings: Privacy, seed: int | None = None, client: str = "") -> None:
        self._settings, self._seed, self._client = settings, seed, client

    @property
    def event(self) -> Event:
        """What an update costs: two clipped ones are at most twice the norm apart."""
        return Event(noise=self._settings.noise / 2.0)

    @torch.no_grad()
    def protected(self, difference: Mapping[str, Tensor], round_: int) -> dict[str, Tensor]:
        """The update, clipped and with noise. Spend `event` first."""
        short, _ = clipped(difference, self._settings.clip)
        noisy = {}
        for name in sorted(short):
            noise = gaussian(source(self._seed, "local", self._client, round_, name), short[name].numel())
            scaled = torch.from_numpy(noise).reshape(short[name].shape) * (self._settings.noise * self._settings.clip)
            noisy[name] = (short[name].double() + scaled).to(short[name].dtype)
        return noisy
