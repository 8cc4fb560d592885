"""The collectives inside the forward and backward pass of a model whose operations are divided.

`enter` and `leave` are f and g of Shoeybi et al., "Megatron-LM" (2019), figure 3; `enter_sequence` and
`leave_sequence` are g and ḡ of Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models"
(2022), figure 5. On the meta device nothing is exchanged: shapes are as they would be.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verbund.comm.collectives import Group
from verbund.errors import TaskError
from verbund.mesh.traffic import Traffic


class Axis:
    """The workers of the axis `tensor`, and what their exchanges cost.

    Args:
        group: the workers.
        traffic: takes note of what the exchanges cost.
    """

    def __init__(self, group: Group, traffic: Traffic | None = None) -> None:
        self.group = group
        self.traffic = traffic if traffic is not None else Traffic(range(group.world), group.world, 1)

    @property
    def worker(self) -> int:
        return self.group.rank

    @property
    def workers(self) -> int:
        return self.group.world

    # -- pairs of forward and backward ---------------------------------------------------------------------------

    def enter(self, x: Tensor) -> Tensor:
        """Forward: x as it is, on all workers. Backward: the sum of all workers' gradients."""
        return _Enter.apply(x, self)  # type: ignore[no-any-return, no-untyped-call]

    def leave(self, x: Tensor) -> Tensor:
        """Forward: the sum over all workers. Backward: the gradient as it is."""
        return _Leave.apply(x, self)  # type: ignore[no-any-return, no-untyped-call]

    def gather(self, x: Tensor, dim: int, lengths: list[int]) -> Tensor:
        """Forward: all workers' shares along `dim`, `lengths` by worker. Backward: this worker's share."""
        return _Gather.apply(x, self, dim, lengths)  # type: ignore[no-any-return, no-untyped-call]

    def enter_sequence(self, x: Tensor, dim: int) -> Tensor:
        """Forward: all workers' equal shares of the sequence. Backward: the sum of the gradients, divided again."""
        return _EnterSequence.apply(x, self, dim)  # type: ignore[no-any-return, no-untyped-call]

    def leave_sequence(self, x: Tensor, dim: int) -> Tensor:
        """Forward: the sum over all workers, divided along the sequence. Backward: all workers' shares."""
        return _LeaveSequence.apply(x, self, dim)  # type: ignore[no-any-return, no-untyped-call]

    # -- without gradients ---------------------------------------------------------------------------------------

    def all_reduce(self, x: Tensor, maximum: bool = False) -> Tensor:
        """The sum, or maximum, over all workers, in new memory."""
        if x.is_meta:
            return x
        x = x.clone(memory_format=torch.contiguous_format)
        with self.traffic.timed():
            self.group.all_reduce(x, "an all-reduce of the axis `tensor`", maximum)
        return x

    def all_gather(self, x: Tensor, dim: int, lengths: list[int]) -> Tensor:
        """All workers' shares along `dim`."""
        shape = list(x.shape)
        if x.is_meta:
            shape[dim] = sum(lengths)
            return x.new_empty(shape)
        longest = max(lengths)
        share = x.movedim(dim, 0)
        if len(share) < longest:
            share = torch.cat([share, share.new_zeros((longest - len(share), *share.shape[1:]))])
        share = share.contiguous()
        whole = share.new_empty((self.workers, *share.shape))
        with self.traffic.timed():
            self.group.finish(self.group.start_all_gather(whole, share), "an all-gather of the axis `tensor`")
        if all(length == longest for length in lengths):
            return whole.flatten(0, 1).movedim(0, dim).contiguous()
        return (
            torch.cat([part[:length] for part, length in zip(whole, lengths, strict=True)]).movedim(0, dim).contiguous()
        )

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """This worker's equal share along `dim` of the sum over all workers, added in the order of the workers."""
        length, rest = divmod(x.shape[dim], self.workers)
        if rest:
            raise TaskError(
                f"a sequence of {x.shape[dim]} elements is not divisible by {self.workers} workers",
                where="strategy.mesh.tensor",
                fix="Give sequences of a multiple of that length, or leave `scatter` out of `tensor_plan()`",
            )
        if x.is_meta:
            return x.narrow(dim, 0, length)
        sent = x.movedim(dim, 0).contiguous()
        share = sent.new_empty((length, *sent.shape[1:]))
        with self.traffic.timed():
            self.group.finish(self.group.start_reduce_scatter(share, sent), "a reduce-scatter of the axis `tensor`")
        return share.movedim(0, dim).contiguous()


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.axis.all_reduce(gradient), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return axis.all_reduce(x) if not x.is_meta else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, lengths: list[int]) -> Tensor:
        ctx.place = (dim, sum(lengths[: axis.worker]), lengths[axis.worker])
        return axis.all_gather(x, dim, lengths)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return gradient.narrow(*ctx.place), None, None, None


class _EnterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return axis.all_gather(x, dim, [x.shape[dim]] * axis.workers)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.axis.reduce_scatter(gradient, ctx.dim), None, None


class _LeaveSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return axis.reduce_scatter(x, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        axis = ctx.axis
        return axis.all_gather(gradient, ctx.dim, [gradient.shape[ctx.dim]] * axis.workers), None, None
