"""The clients of a simulation as one batched computation: parameters, batches and optimiser states of many clients are
stacked, and each local step of all of them is one (`torch.func.vmap`).

A client that has fewer samples in a step gets some again, with the weight zero. Clients are ordered by their steps, so
that those that are done are at the end of the stack, and are left out.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from verbund.exchange.federated.client_side import PERSONAL, Memory
from verbund.exchange.federated.partition import Parts
from verbund.exchange.federated.update import Update
from verbund.mesh import schedule
from verbund.stage.federated.clients import Resident, Trained
from verbund.stage.federated.local import Assignment, LocalOrder, LocalTraining

_STACK_BYTES = 256 << 20
"""Of the tensors that a chunk of clients has at a time; more would not be faster."""
_COPIES = 6  # of a client's parameters: themselves, gradients, momentum, corrections, what is there for a moment
_CLOSE = 1e-5
_TRIED_STEPS = 3

Tensors = dict[str, Tensor]


class NotVectorisable(Exception):
    """Why clients cannot be one computation."""


class Vectorised:
    """Clients that train together.

    Args:
        local: the model, the rule's client side, and the data.
        parts: whose samples are whose.

    Raises:
        NotVectorisable: with the reason.
    """

    def __init__(self, local: LocalTraining, parts: Parts) -> None:
        if reason := _obstacle(local):
            raise NotVectorisable(reason)
        # It works nevertheless, client by client.
        warnings.filterwarnings(
            "ignore", "There is a performance drop because we have not yet implemented the batching"
        )
        self._local, self._parts = local, parts
        self._model, self._task = local.replica.model, local.replica.task
        self._names = list(local.replica.names)
        self._first = {n: p.detach() for n, p in zip(self._names, local.replica.parameters, strict=True)}
        self._losses = vmap(self._loss)
        self._client_bytes = _COPIES * sum(p.nbytes for p in self._first.values())

    def try_out(self) -> None:
        """Trains two clients in both ways and compares.

        Raises:
            NotVectorisable: if it fails, or gives other numbers.
        """
        sizes = self._parts.sizes
        clients = sorted({int(sizes.argmax()), int(sizes.argmin())})
        parameters = self._local.shared()
        told = {name: torch.zeros_like(values) for name, values in self._told(parameters).items()}
        whole = [Assignment(client, 0, 0, parameters, told) for client in clients]
        steps = [self._local.order(each, self._parts.of(each.client)).steps for each in whole]
        few = [
            Assignment(each.client, 0, 0, parameters, told, min(_TRIED_STEPS / count, 1.0))
            for each, count in zip(whole, steps, strict=True)
        ]
        with self._activations() as measured:
            one = list(Resident(self._local, self._parts).train(few, {}))
        self._client_bytes += measured.bytes
        try:
            other = list(self.train(few, {}))
        except (RuntimeError, ValueError, TypeError) as error:
            line = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise NotVectorisable(f"the model does not work under torch.func.vmap ({line})") from error
        finally:
            self._local.put({**parameters, **self._local.first_personal})
        for (a, _), (b, _) in zip(one, other, strict=True):
            for name, values in a.difference.items():
                far = float((values - b.difference[name]).abs().max()) if values.numel() else 0.0
                scale = max(float(values.abs().max()) if values.numel() else 0.0, 1.0)
                if not far <= _CLOSE * scale:
                    raise NotVectorisable(f"`{name}` would differ by {far:.1g} after {_TRIED_STEPS} steps")

    def train(self, assignments: Sequence[Assignment], memories: Mapping[int, Memory]) -> Iterator[Trained]:
        """See `Clients.train`; all assignments are of one round."""
        orders = [self._local.order(each, self._parts.of(each.client)) for each in assignments]
        places = sorted(range(len(orders)), key=lambda place: (-orders[place].steps, place))
        fit = max(_STACK_BYTES // max(self._client_bytes, 1), 1)
        found: list[Trained | None] = [None] * len(orders)
        for low in range(0, len(places), fit):
            chosen = places[low : low + fit]
            chunk = self._chunk(
                [assignments[place] for place in chosen],
                [orders[place] for place in chosen],
                [memories.get(assignments[place].client, {}) for place in chosen],
            )
            for place, trained in zip(chosen, chunk, strict=True):
                found[place] = trained
        for each in found:
            assert each is not None
            yield each

    def _told(self, parameters: Mapping[str, Tensor]) -> Tensors:
        return {f"control/{name}": parameters[name] for name in self._local.side.controlled}

    # -- a chunk of clients --------------------------------------------------------------------------------------

    def _chunk(
        self, assignments: list[Assignment], orders: list[LocalOrder], memories: list[Memory]
    ) -> Iterator[Trained]:
        local, side, count = self._local, self._local.side, len(assignments)
        first, told = assignments[0], assignments[0].told
        assert all(each.round == first.round for each in assignments)
        base = {name: _of_all([each.parameters[name] for each in assignments]) for name in side.shared}
        weights = {name: _stack(values, count) for name, values in base.items()}
        for name in side.personal:
            own = [memory.get(f"{PERSONAL}{name}", local.first_personal[name]) for memory in memories]
            weights[name] = torch.stack(own)
        shifts = [side.shift(each.told, memory) for each, memory in zip(assignments, memories, strict=True)]
        shift = {name: torch.stack([each[name] for each in shifts]) for name in shifts[0]}
        total, counted = self._run(weights, orders, first.round, base, side.proximal, shift)
        differences = {name: weights[name] - base[name] for name in side.shared}
        owned: Tensors = {name: weights[name] for name in side.personal}
        if side.own_model is not None:
            owned = {
                name: torch.stack(
                    [memory.get(f"{PERSONAL}{name}", values[place]) for place, memory in enumerate(memories)]
                )
                for name, values in ((n, _stack(v, count)) for n, v in base.items())
            }
            self._run(owned, orders, first.round, base, side.own_model, {})
        rates, momentum = local.rates()
        for place, (each, order, memory) in enumerate(zip(assignments, orders, memories, strict=True)):
            difference = {name: values[place] for name, values in differences.items()}
            aux, kept = side.after(told, memory, difference, order.steps, rates, momentum)
            kept |= {f"{PERSONAL}{name}": values[place].clone() for name, values in owned.items()}
            size = float(len(self._parts.of(each.client)))
            metrics = {"loss": (total[place], counted[place])}
            yield Update(difference, size, each.version, order.steps, aux, metrics), kept

    def _run(
        self,
        weights: Tensors,
        orders: list[LocalOrder],
        round_: int,
        base: Mapping[str, Tensor],
        proximal: float,
        shift: Mapping[str, Tensor],
    ) -> tuple[list[float], list[float]]:
        """All local steps of all clients; changes `weights`. The losses' sums and weights, by client."""
        local, train = self._local, self._local.job.train
        rates = _rates(local, round_)
        moments: Tensors = {}
        total = torch.zeros(len(orders), dtype=torch.float64)
        counted = torch.zeros(len(orders), dtype=torch.float64)
        self._model.train()
        for step in range(orders[0].steps):
            active = sum(order.steps > step for order in orders)
            batch = self._batch([order.step(step) for order in orders[:active]], orders[0].ticket(step))
            now = {name: values[:active] for name, values in weights.items()}
            gradients, losses, sizes = self._gradients(now, batch)
            total[:active] += losses.double()
            counted[:active] += sizes.double()
            with torch.no_grad():
                self._update(now, gradients, sizes, moments, rates, train.clip_norm, base, proximal, shift)
        return total.tolist(), counted.tolist()

    def _gradients(self, now: Tensors, batch: _Stacked) -> tuple[Tensors, Tensor, Tensor]:
        """Gradients of the summed losses, by parameter that they depend on; losses and weights, by client. A client's
        loss depends on its own slice alone, so that the gradient of all of them together has each one's."""
        leaves = {name: values.detach().requires_grad_() for name, values in now.items()}
        losses, sizes = self._losses(leaves, batch.inputs, batch.targets, batch.mask)
        found = torch.autograd.grad(losses.sum(), list(leaves.values()), allow_unused=True)
        gradients = {name: each for name, each in zip(leaves, found, strict=True) if each is not None}
        return gradients, losses.detach(), sizes.detach()

    def _update(
        self,
        now: Tensors,
        gradients: Tensors,
        sizes: Tensor,
        moments: Tensors,
        rates: dict[str, _Sgd],
        clip: float | None,
        base: Mapping[str, Tensor],
        proximal: float,
        shift: Mapping[str, Tensor],
    ) -> None:
        """A step of SGD of all active clients, as torch.optim.SGD and `Replica.update` take it."""
        active = len(sizes)
        counts = sizes > 0  # whose samples all weigh nothing takes no step
        factor = torch.where(counts, 1.0 / sizes.clamp_min(torch.finfo(sizes.dtype).tiny), 0.0)
        if clip is not None:
            squares = torch.stack([g.flatten(1).square().sum(1) for g in gradients.values()]).sum(0)
            length = squares.sqrt() * factor
            factor = torch.where(length > clip, factor * (clip / length), factor)
        all_count = bool(counts.all())
        for name, gradient in gradients.items():  # what the loss does not use takes no step, as in torch
            rate, values = rates[name], now[name]
            gradient = gradient.mul_(_along(factor, gradient))
            if proximal and name in base:
                gradient.add_(values - _head(base[name], active), alpha=proximal)
            if name in shift:
                gradient.add_(shift[name][:active])
            if rate.decay:
                gradient.add_(values, alpha=rate.decay)
            if rate.momentum:
                gradient = self._with_momentum(name, gradient, moments, rate, counts if not all_count else None)
            if not all_count:
                gradient = gradient * _along(counts.to(gradient.dtype), gradient)
            values.add_(gradient, alpha=-rate.lr)

    def _with_momentum(
        self, name: str, gradient: Tensor, moments: Tensors, rate: _Sgd, counts: Tensor | None
    ) -> Tensor:
        moment = moments.get(name)
        if moment is None:
            moment = moments[name] = gradient.clone()
        else:
            moment = moment[: len(gradient)]
            new = moment * rate.momentum + gradient * (1.0 - rate.dampening)
            moment.copy_(new if counts is None else torch.where(_along(counts, new), new, moment))
        return gradient + rate.momentum * moment if rate.nesterov else moment

    def _loss(self, parameters: Tensors, inputs: Any, targets: Any, mask: Tensor) -> tuple[Tensor, Tensor]:
        """The summed loss of one client's batch, and its weight."""
        if isinstance(inputs, dict):
            output = functional_call(self._model, parameters, (), inputs)
        else:
            arguments = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
            output = functional_call(self._model, parameters, arguments)
        sums = self._task.loss(output, targets)
        return (sums.total * mask).sum(), (sums.weight * mask).sum()

    def _batch(self, ids: list[np.ndarray[Any, Any]], number: int) -> _Stacked:
        """The samples of a step of all active clients."""
        clients, most = len(ids), max(len(each) for each in ids)
        mask = np.zeros((clients, most), np.float32)
        padded = np.empty((clients, most), np.int64)
        for place, each in enumerate(ids):
            padded[place, : len(each)] = each
            padded[place, len(each) :] = each[0]
            mask[place, : len(each)] = 1.0
        batch = self._local.batch(padded.reshape(-1), number)
        device = self._local.replica.device
        columns = {name: values.to(device) for name, values in batch.columns.items()}
        rows = clients * most

        def stacked(value: Any) -> Any:
            if isinstance(value, Tensor):
                if not value.dim() or value.shape[0] != rows:
                    raise NotVectorisable("`inputs` or `targets` give a tensor whose dimension 0 is not the batch")
                return value.view(clients, most, *value.shape[1:])
            if isinstance(value, dict):
                return {key: stacked(inner) for key, inner in value.items()}
            if isinstance(value, (tuple, list)):
                return type(value)(stacked(inner) for inner in value)
            raise NotVectorisable(f"`inputs` or `targets` give a {type(value).__name__}")

        return _Stacked(
            stacked(self._task.inputs(columns)),
            stacked(self._task.targets(columns)),
            torch.from_numpy(mask).to(device),
        )

    def _activations(self) -> _Activations:
        return _Activations(self._model, self._local.job.train.global_batch)


@dataclass(frozen=True)
class _Stacked:
    inputs: Any
    targets: Any
    mask: Tensor


@dataclass(frozen=True)
class _Sgd:
    """The arguments of a parameter's SGD."""

    lr: float
    momentum: float
    dampening: float
    decay: float
    nesterov: bool


class _Activations:
    """Within the block it is measured what a model's modules give for a batch: about what a client needs besides."""

    def __init__(self, model: nn.Module, batch: int) -> None:
        self._model, self._batch = model, batch
        self._handles: list[Any] = []
        self._largest: dict[int, int] = {}

    @property
    def bytes(self) -> int:
        """What all modules gave, and as much again for gradients."""
        return 2 * sum(self._largest.values())

    def __enter__(self) -> _Activations:
        def hook(module: nn.Module, _inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                self._largest[id(module)] = max(self._largest.get(id(module), 0), output.nbytes)

        self._handles = [module.register_forward_hook(hook) for module in self._model.modules()]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()


def _obstacle(local: LocalTraining) -> str | None:
    """Why clients cannot be one computation, as far as the settings tell."""
    replica, train = local.replica, local.job.train
    optimizer = replica.optimizer
    checks: list[tuple[bool, str]] = [
        (type(optimizer) is not torch.optim.SGD, f"the optimiser is `{train.optimizer.name}`, not `sgd`"),
        (any(group.get("maximize") for group in optimizer.param_groups), "the optimiser maximises"),
        (local.changes_buffers, "the model has buffers that training changes"),
        (replica.task.couples, "the task says that its samples interact"),
        (train.precision not in ("fp32", "fp64"), f"the precision is `{train.precision}`"),
        (train.compile, "the model is compiled"),
        (bool(train.activation_checkpointing), "activations are checkpointed"),
        (local.examples is not None, "each sample's gradient is clipped by itself"),
        (local.side.settings.name == "fedrep", "`fedrep` trains parts of the model in turn"),
    ]
    return next((why for there, why in checks if there), None)


def _rates(local: LocalTraining, round_: int) -> dict[str, _Sgd]:
    """By parameter, at a round's place in the schedule."""
    replica = local.replica
    schedule.apply(replica.optimizer, schedule.factor(local.job.train.schedule, round_, local.total_rounds))
    names = {id(p): name for name, p in zip(replica.names, replica.parameters, strict=True)}
    return {
        names[id(p)]: _Sgd(
            float(group["lr"]),
            float(group["momentum"]),
            float(group["dampening"]),
            float(group["weight_decay"]),
            bool(group["nesterov"]),
        )
        for group in replica.optimizer.param_groups
        for p in group["params"]
    }


def _of_all(values: list[Tensor]) -> Tensor:
    """What all clients begin from: one tensor with a first dimension of 1, or one each."""
    return values[0].unsqueeze(0) if all(v is values[0] for v in values) else torch.stack(values)


def _stack(values: Tensor, count: int) -> Tensor:
    return values.expand(count, *values.shape[1:]).clone()


def _head(values: Tensor, active: int) -> Tensor:
    return values if len(values) == 1 else values[:active]


def _along(values: Tensor, like: Tensor) -> Tensor:
    """[clients] beside a tensor [clients, …]."""
    return values.view(-1, *(1,) * (like.dim() - 1))


def clients_of(local: LocalTraining, parts: Parts, note: Callable[[str], None]) -> Resident | Vectorised:
    """What trains the clients of a simulation: all at once if that is possible, else one after the other.

    Args:
        local: trains one.
        parts: whose samples are whose.
        note: is told why they take turns.
    """
    if local.examples is not None:
        some = parts.of(int(parts.sizes.argmax()))[:_TRIED_STEPS]
        if why := local.examples.try_out(local.batch(some, 0)):
            note(f"Gradients of single samples are computed one after the other: {why}")
    try:
        vectorised = Vectorised(local, parts)
        vectorised.try_out()
    except NotVectorisable as reason:
        note(f"Clients take turns instead of being one computation: {reason}")
        return Resident(local, parts)
    return vectorised
