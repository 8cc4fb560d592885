"""The axis `data`: every worker holds the whole model and computes its share of the global batch; gradients are
all-reduced as sums, overlapped with the backward pass.

Gradients are gathered into flat buckets in the reverse order of the parameters, which is about the order in which
the backward pass makes them (Li et al., "PyTorch Distributed", VLDB 2020, section 3.2.3). The last bucket carries,
after its gradients, everything else that a step must agree on: loss, weight, flags, which parameters were used, and
running statistics. So a step costs no collective besides those of its gradients. Where gradients are compressed, the
last bucket is not: it carries what is added up as it is.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from verbund.comm.collectives import Group, Work
from verbund.comm.compression.sums import CompressedSums, Stamps
from verbund.errors import InputError
from verbund.mesh.compression import GradientCompression

# Large enough that a collective's latency does not count, small enough that most of a large model is under way before
# the backward pass ends; measured on two cores with models of 1 to 80 MB.
BUCKET_BYTES = 4 << 20
_WEIGHT_UNIT = 4096.0
_NUMBERS = 5  # loss, weight in units of 4096, rest of the weight, flag, workers whose gradients are not finite


@dataclass(frozen=True)
class StepSums:
    """What all workers know after the all-reduce of a step.

    Args:
        loss: the sum of the samples' losses.
        weight: what it is to be divided by.
        flags: the sum of the workers' flags (reasons to stop after this step).
        extra: the summed extra numbers, shape [extras].
        told: what each worker told of the step, shape [workers * told].
    """

    loss: float
    weight: float
    flags: float
    extra: Tensor
    told: Sequence[float] = ()


class _Bucket:
    """A flat stretch of memory that holds the gradients of some parameters."""

    def __init__(self, parameters: list[nn.Parameter], tail: int, group: Group) -> None:
        sizes = [p.numel() for p in parameters]
        self.flat = group.empty(sum(sizes) + tail, parameters[0].dtype).zero_()
        self.parameters = parameters
        pieces = torch.split(self.flat, [*sizes, tail])
        self.views = [like(piece, p) for piece, p in zip(pieces[:-1], parameters, strict=True)]
        self.tail = pieces[-1]
        self.missing = len(parameters)
        self.compressed: int | None = None
        """Its number among those that are compressed."""
        self.work: Work | None = None
        self.arrival = 0

    @property
    def gradients(self) -> Tensor:
        """All of it but the numbers at its end."""
        return self.flat[: self.flat.numel() - self.tail.numel()]

    def collect(self) -> None:
        """Copies into the bucket whatever gradients are not there yet; what has none becomes zero."""
        sources, targets = [], []
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad is not view:
                sources.append(parameter.grad)
                targets.append(view)
        if sources:
            torch._foreach_copy_(targets, sources)


def _groups(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters that share a bucket: of one dtype, and of no more bytes than that, but for one that is larger."""
    groups: list[list[nn.Parameter]] = []
    size = 0
    for parameter in parameters:
        if not groups or size + parameter.nbytes > BUCKET_BYTES or parameter.dtype != groups[-1][0].dtype:
            groups.append([])
            size = 0
        groups[-1].append(parameter)
        size += parameter.nbytes
    return groups


def like(piece: Tensor, parameter: Tensor) -> Tensor:
    """A flat piece of memory as a gradient with the parameter's own strides (channels last, transposed): optimisers
    walk both side by side."""
    if not parameter.numel():
        return piece.view(parameter.shape)
    place = sorted(zip(parameter.stride(), parameter.shape, strict=True))
    expected = 1
    for stride, size in place:
        if size != 1 and stride != expected:
            raise InputError(
                f"a parameter of shape {list(parameter.shape)} has strides {list(parameter.stride())}, which overlap "
                "or have gaps",
                where="model()",
                fix="Make it contiguous: nn.Parameter(value.contiguous())",
            )
        expected *= size
    return piece.as_strided(parameter.shape, parameter.stride(), piece.storage_offset())


class GradientSums:
    """Adds up the gradients of a step over all workers.

    Call `begin`, then the backward passes (with `overlap` before the last), then `finish`.

    Args:
        parameters: the trained parameters, in the model's order, the same on all workers.
        group: the workers of the axis.
        extras: how many extra numbers travel with the gradients (running statistics).
        beyond: groups whose members hold other parts of the same replica, and with whom the numbers, but no
            gradients, are added up after that; the last of them without the extra numbers.
        compression: of the gradients, if the job has any.
        slots: numbers that workers tell each other with every step, each in places of its own.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: Group,
        extras: int = 0,
        beyond: Sequence[Group] = (),
        compression: GradientCompression | None = None,
        slots: int = 0,
    ) -> None:
        self._group = group
        self._beyond = beyond
        self._parameters = list(parameters)
        self._buckets: list[_Bucket] = []
        self._launched = 0
        self._overlapping = False
        self._head = _NUMBERS + slots
        tail = self._head + extras + len(self._parameters)
        dtype = torch.float64 if any(p.dtype == torch.float64 for p in parameters) else torch.float32
        self._numbers = torch.zeros(tail, dtype=dtype, device=self._parameters[0].device)
        self._extras = extras
        self.stamps: list[Stamps] = []
        self.exact = False
        """Nothing is compressed while this is set."""
        self._compression = compression
        self._compressed: CompressedSums | None = None
        self._compressing = False
        self._hooks: list[Any] = []
        if group.world > 1:
            self._cut(tail)

    def regroup(self, group: Group, slots: int = 0) -> None:
        """From now on gradients are added up with these workers, who tell each other so many numbers; what was under
        way is forgotten."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._buckets.clear()
        self._group = group
        for parameter in self._parameters:
            parameter.grad = None
        self._numbers = self._numbers.new_zeros(self._numbers.numel() - self._head + _NUMBERS + slots)
        self._head = _NUMBERS + slots
        if group.world > 1:
            self._cut(self._numbers.numel())

    @property
    def buckets(self) -> int:
        """How many all-reduces a step takes."""
        return max(len(self._buckets), 1)

    def gradients(self) -> list[Tensor]:
        """The gradients as few tensors: whole buckets where there are any. To scale them or take their norm."""
        if self._buckets:
            return [bucket.gradients for bucket in self._buckets]
        return [p.grad for p in self._parameters if p.grad is not None]

    def begin(self, step: int = 0, scale: float = 1.0) -> None:
        """Forgets the gradients of the former step.

        Args:
            step: the number of the one that begins.
            scale: a factor that its gradients have for their precision's sake.
        """
        for parameter in self._parameters:
            parameter.grad = None
        self._launched = 0
        self._overlapping = False
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)
        if self._compressed is not None and self._compression is not None:
            self._compressing = not self.exact and step >= self._compression.settings.exact_steps
            if self._compressing:
                self._compressed.begin(step, scale)

    def overlap(self) -> None:
        """From now on a bucket is sent as soon as its last gradient is there: the backward pass that follows is the
        step's last."""
        self._overlapping = len(self._buckets) > 1

    def finish(
        self,
        loss: float | Tensor,
        weight: float,
        flag: float,
        extra: Tensor | None = None,
        told: tuple[int, Sequence[float]] = (0, ()),
    ) -> StepSums:
        """Sends what is not sent yet, waits for all, and leaves the sums in the parameters' `grad`. `told` is what this
        worker tells the others, and from which slot on.

        A parameter that no worker used keeps `grad` None, so that an optimiser passes it over as it does in one
        process.
        """
        numbers = self._numbers
        high, low = divmod(weight, _WEIGHT_UNIT)
        used = [0.0 if p.grad is None else 1.0 for p in self._parameters] if self._buckets else []
        slots = [0.0] * (self._head - _NUMBERS)
        slots[told[0] : told[0] + len(told[1])] = told[1]
        known = torch.tensor([high, low, flag, 0.0, *slots, *used], dtype=numbers.dtype)
        numbers[0] = loss
        numbers[1 : 1 + len(known)] = known
        if extra is not None and self._extras:
            numbers[-self._extras :] = extra
        self.stamps = []
        values = numbers
        if self._buckets:
            self._send_rest()
            self._wait()
            values = self._buckets[-1].tail
        values = self._with_others(values)
        extras = values[len(values) - self._extras :]
        loss_, high_, low_, flags, unfit, *counts = values[: len(values) - self._extras].tolist()
        slots, counts = counts[: len(slots)], counts[len(slots) :]
        weight = high_ * _WEIGHT_UNIT + low_
        if self._compressing and self._compressed is not None and self._compression is not None:
            unused = self._compression.unused(self._parameters, counts)
            self._compressed.finish(take=weight != 0, finite=unfit == 0, unused=unused)
            self.stamps += self._compressed.stamps
        if self._buckets:
            self._hand_over(counts)
        return StepSums(loss_, weight, flags, extras, slots)

    def _with_others(self, values: Tensor) -> Tensor:
        """Adds up the numbers with the workers that have other samples (axis `shard`) or other layers."""
        for index, group in enumerate(self._beyond):
            if group.world == 1:
                continue
            values = values.clone()
            if index < len(self._beyond) - 1:
                shared = values[len(values) - self._extras :]
                shared = torch.cat([values[: self._head], shared])
                group.all_reduce(shared, "the all-reduce of the step's numbers")
                values[len(values) - self._extras :] = shared[self._head :]
                values[: self._head] = shared[: self._head]
            else:
                group.all_reduce(values[: self._head], "the all-reduce of the step's numbers")
        return values

    def _cut(self, tail: int) -> None:
        takes = self._compression.takes if self._compression is not None else lambda _: False
        backwards = self._parameters[::-1]
        compressed = _groups([p for p in backwards if takes(p)])
        for number, parameters in enumerate(compressed):
            bucket = _Bucket(parameters, 0, self._group)
            bucket.compressed = number
            self._buckets.append(bucket)
        if self._compression is not None and compressed:
            stretches = [(bucket.flat, bucket.parameters) for bucket in self._buckets]
            self._compressed = self._compression.build(self._group, stretches)
        groups = _groups([p for p in backwards if not takes(p)])
        for index, parameters in enumerate(groups):
            carries = index == len(groups) - 1 and parameters[0].dtype == self._numbers.dtype
            self._buckets.append(_Bucket(parameters, tail if carries else 0, self._group))
        if not self._buckets[-1].tail.numel():
            nothing = nn.Parameter(self._numbers.new_zeros(0))
            self._buckets.append(_Bucket([nothing], tail, self._group))
        if len(self._buckets) > 1:
            for number, bucket in enumerate(self._buckets):
                for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                    if parameter.numel():
                        self._hook(parameter, view, number)

    def _hook(self, parameter: nn.Parameter, view: Tensor, number: int) -> None:
        bucket = self._buckets[number]

        def arrived(_: Tensor) -> None:
            if not self._overlapping:
                return
            assert parameter.grad is not None
            view.copy_(parameter.grad)
            parameter.grad = view
            bucket.missing -= 1
            # The last bucket waits for `finish`: it carries the step's numbers.
            while self._launched < len(self._buckets) - 1 and self._buckets[self._launched].missing == 0:
                self._launch(self._buckets[self._launched])

        self._hooks.append(parameter.register_post_accumulate_grad_hook(arrived))  # type: ignore[no-untyped-call]

    def _launch(self, bucket: _Bucket) -> None:
        bucket.arrival = time.monotonic_ns()
        if self._compressing and self._compressed is not None and bucket.compressed is not None:
            self._compressed.start(bucket.compressed)
        else:
            bucket.work = self._group.start_all_reduce(bucket.flat)
            if self._compressed is not None and not self.exact:
                self._compressed.totals.plain(bucket.flat.nbytes)
        self._launched += 1

    def _send_rest(self) -> None:
        self._overlapping = False
        while self._launched < len(self._buckets):
            bucket = self._buckets[self._launched]
            bucket.collect()
            if bucket.tail.numel():
                if self._compressing and self._compressed is not None:
                    self._numbers[_NUMBERS - 1] = float(not self._compressed.sent())
                bucket.tail.copy_(self._numbers)
            self._launch(bucket)

    def _wait(self) -> None:
        blocked = time.monotonic_ns()
        for bucket in self._buckets:
            if bucket.work is None:
                continue
            self._group.finish(bucket.work, "the all-reduce of the gradients")
            bucket.work = None
            done = time.monotonic_ns()
            self.stamps.append(Stamps(bucket.arrival, blocked, done))
            blocked = done

    def _hand_over(self, users: list[float]) -> None:
        """Gives the parameters their sums; `users` says how many workers used each."""
        unused = {id(p) for p, count in zip(self._parameters, users, strict=True) if not count}
        for bucket in self._buckets:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.grad = None if id(parameter) in unused else view
