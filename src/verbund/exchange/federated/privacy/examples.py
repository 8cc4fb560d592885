"""Example-level differential privacy: DP-SGD (Abadi et al., "Deep Learning with Differential Privacy", CCS 2016)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn.modules.batchnorm import _BatchNorm

from verbund.errors import InputError
from verbund.exchange.federated.privacy.event import Event
from verbund.exchange.federated.privacy.noise import gaussian, source
from verbund.job.federated_privacy import Privacy

SampleLoss: TypeAlias = Callable[..., Tensor]
"""Of parameters (by name) and one sample's tensors, without a batch dimension: its loss, a scalar."""


def sample_gradients(
    loss: SampleLoss, parameters: Mapping[str, Tensor], samples: tuple[Tensor, ...], at_once: int | None = None
) -> dict[str, Tensor]:
    """Gradients of each sample by itself: by name [samples, *shape].

    Args:
        loss: of one sample, e.g. by `torch.func.functional_call`.
        parameters: by name.
        samples: tensors with the samples along dimension 0.
        at_once: samples whose gradients are computed together; None: all.
    """
    dims = (None, *[0] * len(samples))
    found: dict[str, Tensor] = vmap(grad(loss), in_dims=dims, randomness="different", chunk_size=at_once)(
        dict(parameters), *samples
    )
    return found


def clipped_sum(gradients: Mapping[str, Tensor], bound: float) -> tuple[dict[str, Tensor], Tensor]:
    """The sum of the samples' gradients, each shortened to the norm `bound`, and their norms before: float64 [samples].

    A sample whose gradient is not finite contributes nothing.
    """
    each_norm = [
        torch.linalg.vector_norm(g.detach().flatten(1), dim=1, dtype=torch.float64) for g in gradients.values()
    ]
    norms = torch.stack(each_norm).square().sum(0).sqrt()
    finite = norms.isfinite()
    # Rounding to the gradients' type must not lengthen what was shortened.
    shorter = 1.0 - 4.0 * max(torch.finfo(each.dtype).eps for each in gradients.values())
    factors = torch.where(norms > bound, bound / norms * shorter, 1.0).masked_fill(~finite, 0.0)
    whole = bool(finite.all())
    total = {}
    for name, each in gradients.items():
        kept = each.detach()
        if not whole:
            kept = kept.masked_fill(~finite.reshape(-1, *[1] * (each.dim() - 1)), 0.0)
        total[name] = torch.tensordot(factors.to(each.dtype), kept, dims=1)
    return total, norms


def check_model(model: nn.Module) -> None:
    """Whether a gradient of one sample is a thing that this model has.

    Raises:
        InputError: if a layer mixes samples.
    """
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            raise InputError(
                f"the layer `{name}` ({type(module).__name__}) mixes the samples of a batch, so that no gradient "
                "belongs to one sample alone",
                where="strategy.exchange.privacy.kind",
                fix="Use GroupNorm or LayerNorm in its place, or `privacy.kind` `central`",
            )


class ExamplePrivacy:
    """What a client's local steps are under DP-SGD.

    Args:
        settings: the section `privacy`.
        samples: how many the client has.
        rate: the probability with which each of them is in a step's batch.
        seed: None but in simulations, and where several workers draw alike: see `noise.source`.
        client: its name, for simulations.

    Raises:
        InputError: if the rate is none.
    """

    protects = (
        "whether any one sample of this client is used or left out (its gradient zero; how many samples there are is "
        "taken as known)"
    )
    """The adjacency ("zero-out") under which a rate may depend on the number of samples; it costs as much as adding or
    removing one (Ponomareva et al., "How to DP-fy ML", JAIR 2023, section 2.1)."""

    def __init__(
        self, settings: Privacy, samples: int, rate: float, seed: int | str | None = None, client: str = ""
    ) -> None:
        if not 0.0 < rate <= 1.0 or samples < 1:
            raise InputError(
                f"{samples} samples, each with probability {rate:g} in a batch",
                where="strategy.exchange.privacy",
                fix="The global batch must be between 1 and the number of samples",
            )
        self._settings, self._samples, self._rate = settings, samples, rate
        self._seed, self._client = seed, client

    @property
    def mean(self) -> float:
        """Samples of a batch on average: what sums are divided by, whoever came."""
        return self._rate * self._samples

    @property
    def event(self) -> Event:
        """What a step costs, if its batch is that of `batch`."""
        return Event(noise=self._settings.noise, rate=self._rate)

    def batch(self, step: int) -> Tensor:
        """The samples of a step: each joins by a draw of its own (Poisson sampling), so that it may be none. int64."""
        words = source(self._seed, "batch", self._client, step).words(0, self._samples, np.uint64)
        joins = (words >> np.uint64(11)) * 2.0**-53 < self._rate
        return torch.from_numpy(np.flatnonzero(joins))

    def gradients(
        self,
        loss: SampleLoss,
        parameters: Mapping[str, Tensor],
        samples: tuple[Tensor, ...],
        step: int,
        at_once: int = 64,
    ) -> dict[str, Tensor]:
        """The step's gradient: clipped per sample, added up, with noise, divided by the mean batch. Spend `event`
        first.

        Args:
            loss: of one sample.
            parameters: by name.
            samples: of `batch(step)`, along dimension 0; none at all gives noise alone.
            step: its number, for simulations.
            at_once: samples whose gradients are in memory together.
        """
        total = {name: torch.zeros_like(values, dtype=torch.float64) for name, values in parameters.items()}
        for start in range(0, len(samples[0]), at_once):
            some = tuple(each[start : start + at_once] for each in samples)
            part, _ = clipped_sum(sample_gradients(loss, parameters, some), self._settings.clip)
            for name in total:
                total[name] += part[name]
        return {name: values.to(parameters[name].dtype) for name, values in self.noisy(total, step).items()}

    def noisy(self, total: Mapping[str, Tensor], step: int) -> dict[str, Tensor]:
        """The sum of clipped gradients with its noise, divided by the mean batch: float64, by name.

        Args:
            total: the sum, by name, float64.
            step: its number.
        """
        out = {}
        for name in sorted(total):
            noise = gaussian(source(self._seed, "step", self._client, step, name), total[name].numel())
            drawn = torch.from_numpy(noise).reshape(total[name].shape).to(total[name].device)
            out[name] = (total[name] + drawn * (self._settings.noise * self._settings.clip)) / self.mean
        return out
