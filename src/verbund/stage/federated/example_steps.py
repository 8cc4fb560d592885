"""A client's local steps where each of its samples is protected (DP-SGD): which samples a step has, and its gradient.

Gradients of single samples are one computation (`torch.func.vmap`) where that gives what single samples give; else the
model sees one sample at a time. Packages that not everybody has are needed from here on.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from verbund.data.batch import Batch
from verbund.data.samples import Ids
from verbund.errors import InputError
from verbund.exchange.federated.privacy.event import Event
from verbund.exchange.federated.privacy.examples import ExamplePrivacy, check_model, clipped_sum
from verbund.job import Job, Privacy
from verbund.mesh.changing_buffers import changing
from verbund.mesh.replica import Replica

_AT_ONCE, _AT_LEAST = 256, 8
"""Samples whose gradients are there at a time: so many at most, and so many if there is room at all."""
_CACHED_BYTES, _ROOM_BYTES = 16 << 20, 256 << 20
"""Of their gradients: what is not faster if it is more, and what must not be exceeded."""
_CLOSE = 1e-5
_TRIED = 3

Tensors = dict[str, Tensor]


def check(replica: Replica) -> None:
    """Whether a model and its task can be trained so.

    Raises:
        InputError: if samples are not apart.
    """
    check_model(replica.model)
    where, fix = "strategy.exchange.privacy.kind", "Use another model, or `privacy.kind` `central`"
    if buffers := changing(replica.model):
        what = f"training changes the buffer `{buffers[0].name}`, which would tell of samples without noise"
        raise InputError(what, where=where, fix=fix)
    if replica.task.couples:
        what = "the task says that its samples interact, so that no gradient belongs to one sample alone"
        raise InputError(what, where=where, fix=fix)


def local_steps(job: Job, samples: int) -> int:
    """Local steps of a round of a client with so many samples."""
    exchange = job.strategy.exchange
    return exchange.local_steps or (exchange.local_epochs or 1) * -(-samples // job.train.global_batch)


def rate(job: Job, samples: int) -> float:
    """The probability with which each of so many samples is in a batch, whose mean size is `train.global_batch`."""
    return min(job.train.global_batch / samples, 1.0)


def round_of(job: Job, samples: int) -> tuple[Event, int]:
    """What a step costs a client with so many samples, and how many a round has."""
    return Event(noise=job.strategy.exchange.privacy.noise, rate=rate(job, samples)), local_steps(job, samples)


class ExampleSteps:
    """Gradients of local steps.

    Args:
        replica: of the client's own mesh, which does not divide the model.
        job: the privacy, and how many samples may be computed at once.
    """

    def __init__(self, replica: Replica, job: Job) -> None:
        check(replica)
        self._replica, self._clip = replica, job.strategy.exchange.privacy.clip
        self._parameters = dict(zip(replica.names, replica.parameters, strict=True))
        each = max(sum(values.nbytes for values in self._parameters.values()), 1)
        fit = max(_CACHED_BYTES // each, min(_AT_LEAST, _ROOM_BYTES // each), 1)
        self._at_once = min(fit, _AT_ONCE, job.train.micro_batch or _AT_ONCE)
        self._plain = job.train.precision in ("fp32", "fp64") and not job.train.compile
        self._together: bool | None = None

    def privacy(self, settings: Privacy, job: Job, samples: int, seed: int | str, client: int) -> ExamplePrivacy:
        """What a round of a client draws its batches and its noise by."""
        return ExamplePrivacy(settings, samples, rate(job, samples), seed, str(client))

    def try_out(self, batch: Batch) -> str | None:
        """Decides how single samples' gradients are computed; why not all at once, if so.

        Args:
            batch: some samples.
        """
        self._together = False
        if not self._plain:
            return "the model is compiled or computes in 16 bits"
        if not len(batch.ids):
            return "there are no samples to try"
        few = _part(batch, 0, _TRIED)
        self._replica.model.train()
        alone = [self._alone(_part(few, place, place + 1))[0] for place in range(len(few.ids))]
        try:
            together, _ = self._vectorised(few)
        except (RuntimeError, ValueError, TypeError, InputError) as error:
            line = str(error).splitlines()[0] if str(error) else type(error).__name__
            return f"the model does not work under torch.func.vmap ({line})"
        for place, one in enumerate(alone):
            for name, values in one.items():
                far = float((values[0] - together[name][place]).abs().max()) if values.numel() else 0.0
                if not far <= _CLOSE * max(float(values.abs().max()) if values.numel() else 0.0, 1.0):
                    return f"the gradient of `{name}` would differ by {far:.1g}"
        self._together = True
        return None

    def step(
        self, ids: Ids, number: int, read: Callable[[Ids, int], Batch], privacy: ExamplePrivacy
    ) -> tuple[float, float]:
        """Leaves the noisy mean gradient in the parameters; the batch's loss and weight, which have no noise.

        Args:
            ids: the batch's samples; may be none, and then there is noise alone.
            number: of the step, which keys what is drawn.
            read: the samples as a step has them.
            privacy: of the round.
        """
        replica = self._replica
        replica.model.train()
        world, place = replica.mesh.size("data"), replica.mesh.place("data")
        mine = np.array_split(ids, world)[place]
        total = {name: torch.zeros_like(v, dtype=torch.float64) for name, v in self._parameters.items()}
        sums = torch.zeros(2, dtype=torch.float64)
        for low in range(0, len(mine), self._at_once):
            batch = read(mine[low : low + self._at_once], number)
            if self._together is None:
                self.try_out(batch)
            self._add(batch, total, sums)
        if world > 1:
            flat = torch.cat([*(values.reshape(-1) for values in total.values()), sums.to(replica.device)])
            replica.groups.island.all_reduce(flat, "the all-reduce of clipped gradients")
            parts = torch.split(flat, [*(values.numel() for values in total.values()), 2])
            total = {n: part.view_as(v) for (n, v), part in zip(total.items(), parts[:-1], strict=True)}
            sums = parts[-1].cpu()
        for name, values in privacy.noisy(total, number).items():
            parameter = self._parameters[name]
            parameter.grad = values.to(parameter)
        return float(sums[0]), float(sums[1])

    def _add(self, batch: Batch, total: Tensors, sums: Tensor) -> None:
        """Adds the clipped gradients of some samples, and their losses and weights."""
        cuts = [batch] if self._together else [_part(batch, i, i + 1) for i in range(len(batch.ids))]
        for cut in cuts:
            gradients, told = self._vectorised(cut) if self._together else self._alone(cut)
            clipped, _ = clipped_sum(gradients, self._clip)
            for name, values in clipped.items():
                total[name] += values
            sums += told

    def _alone(self, batch: Batch) -> tuple[Tensors, Tensor]:
        """The gradient of one sample, [1, *shape] by name; its loss and weight."""
        sums = self._replica.losses(batch)
        value = (sums.total / _positive(sums.weight)).sum()
        found = torch.autograd.grad(value, list(self._parameters.values()), allow_unused=True)
        gradients = {
            name: (torch.zeros_like(parameter) if each is None else each)[None]
            for (name, parameter), each in zip(self._parameters.items(), found, strict=True)
        }
        return gradients, torch.stack([sums.total.detach().sum(), sums.weight.detach().sum()]).double().cpu()

    def _vectorised(self, batch: Batch) -> tuple[Tensors, Tensor]:
        """The gradients of all samples of a batch, [samples, *shape] by name; the sums of losses and weights."""
        task = self._replica.task
        columns = {name: values.to(self._replica.device) for name, values in batch.columns.items()}
        now = {name: values.detach() for name, values in self._parameters.items()}
        each = vmap(grad(self._loss, has_aux=True), in_dims=(None, 0, 0), randomness="different")
        gradients, (totals, weights) = each(now, task.inputs(columns), task.targets(columns))
        return gradients, torch.stack([totals.sum(), weights.sum()]).detach().double().cpu()

    def _loss(self, parameters: Tensors, inputs: object, targets: object) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """A sample's own mean loss, as of a batch of one; its loss and weight."""
        one, target = _batched(inputs), _batched(targets)
        model = self._replica.model
        if isinstance(one, dict):
            output = functional_call(model, parameters, (), one)
        else:
            output = functional_call(model, parameters, tuple(one) if isinstance(one, (tuple, list)) else (one,))
        sums = self._replica.task.loss(output, target)
        return (sums.total / _positive(sums.weight)).sum(), (sums.total.sum(), sums.weight.sum())


def _positive(weights: Tensor) -> Tensor:
    """Weights to divide by: a sample that weighs nothing has the loss 0."""
    return torch.where(weights > 0, weights, torch.ones_like(weights))


def _part(batch: Batch, low: int, high: int) -> Batch:
    return Batch(batch.ticket, batch.ids[low:high], {name: v[low:high] for name, v in batch.columns.items()})


def _batched(value: object) -> object:
    """One sample's tensors as a batch of one."""
    if isinstance(value, Tensor):
        return value.unsqueeze(0)
    if isinstance(value, dict):
        return {key: _batched(inner) for key, inner in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_batched(inner) for inner in value)
    raise TypeError(f"`inputs` or `targets` give a {type(value).__name__}")
