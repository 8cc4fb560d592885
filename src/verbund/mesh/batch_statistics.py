"""Batch statistics (BatchNorm and its kin) that do not depend on how a global batch is divided.

Over groups: every forward pass is a group of fixed composition, so the stock modules do; what is left are the running
statistics, which `BufferDeltas` averages over the groups. Over the whole global batch: `synchronise` replaces the
modules' forward by one whose statistics are all-reduced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from verbund.errors import TaskError
from verbund.mesh.changing_buffers import Buffer, changing, persistent
from verbund.randomness.override import Override

AllReduce = Callable[[Tensor], None]


def has_batch_statistics(model: nn.Module) -> bool:
    """Whether what the model computes for a sample in training depends on the others of its forward pass.

    True for every BatchNorm, but not for one that stays in evaluation while the model trains.
    """
    return any(isinstance(module, _BatchNorm) and (module.training or not model.training) for module in model.modules())


def running_statistics(model: nn.Module) -> tuple[Tensor, ...]:
    """The buffers of torch's own modules with batch statistics."""
    modules = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    return tuple(b for module in modules for b in module.buffers(recurse=False) if not b.is_meta)


class BufferDeltas:
    """Makes what training forwards do to buffers (running statistics) independent of the division.

    At a step's start the buffers have a value R. Every forward pass starts from R; the change it makes is weighted by
    its samples. After the step a floating-point buffer is R + Σ nᵢ·Δᵢ / Σ nᵢ, and an integer one (a counter) R + Δ of
    the pass that had the first samples of the global batch. For one forward pass of the whole batch that is exactly
    what the module itself would have done.

    `size` is the length of `flat`, the same on all workers and in all steps; 0 if the model has no such buffers.

    Args:
        model: its buffers, as `changing_buffers` finds them.
    """

    def __init__(self, model: nn.Module) -> None:
        watched = changing(model)
        known = {(id(buffer.module), buffer.key) for buffer in watched}
        self._constant = [buffer for buffer in persistent(model) if (id(buffer.module), buffer.key) not in known]
        by_kind: dict[tuple[torch.dtype, torch.device], list[Buffer]] = {}
        for buffer in watched:
            tensor = buffer.get()
            if not tensor.is_contiguous():
                buffer.put(tensor := tensor.contiguous())
            by_kind.setdefault((tensor.dtype, tensor.device), []).append(buffer)
        self._kinds = [_Kind(buffers) for buffers in by_kind.values()]
        self.size = sum(kind.size for kind in self._kinds)
        self._first = False
        self._within = False  # whether a step has begun, and is not applied
        self._versions: list[tuple[Tensor, int]] = []

    def begin(self, first: bool) -> None:
        """Remembers the values at the step's start.

        Args:
            first: whether this worker has the first samples of the global batch.
        """
        self._versions = [(tensor, tensor._version) for tensor in (buffer.get() for buffer in self._constant)]
        self._first = first
        for kind in self._kinds:
            kind.begin()
        self._within = True

    def undo(self) -> None:
        """Puts the values at the start of a step back that has been broken off, perhaps within a forward pass."""
        if self._within:
            self._within = False
            for kind in self._kinds:
                kind.undo()

    def add(self, samples: int) -> None:
        """Takes in what one forward pass of `samples` samples has changed, and puts the values back.

        Raises:
            TaskError: if a buffer changed that none of its module's own methods writes to, or if one changed its shape.
        """
        for buffer, (tensor, version) in zip(self._constant, self._versions, strict=True):
            now = buffer.get()
            if now is not tensor or now._version != version:
                raise TaskError(
                    f"the buffer `{buffer.name}` changes in training, but not by its module's own methods",
                    where="model()",
                    fix=f"Write `self.{buffer.key}.copy_(…)` in a method of its module, so that it is averaged over "
                    "the workers, or register it with persistent=False if it is no state",
                )
        for kind in self._kinds:
            kind.add(samples, self._first)
        self._first = False

    def averaged(self) -> list[Buffer]:
        """The buffers that are averaged over samples: those of floating point."""
        return [buffer for kind in self._kinds if kind.averaged for buffer in kind.buffers]

    def flat(self) -> Tensor:
        """The changes of this worker as one vector, to be added up over the workers; shape [size], float32 or, for
        buffers of float64, float64."""
        parts = [kind.change for kind in self._kinds]
        if len(parts) == 1:
            return parts[0]
        return torch.cat([part.to(parts[0].device) for part in parts]) if parts else torch.zeros(0)

    def apply(self, total: Tensor, samples: int) -> None:
        """Gives the buffers their values after the step.

        Args:
            total: the sum of all workers' `flat`.
            samples: those of the global batch.
        """
        place = 0
        self._within = False
        for kind in self._kinds:
            kind.apply(total[place : place + kind.size], samples)
            place += kind.size


class _Kind:
    """The buffers of one dtype and device, as one flat tensor: a few calls of torch for all of them."""

    def __init__(self, buffers: list[Buffer]) -> None:
        self.buffers = buffers
        self._tensors = [buffer.get() for buffer in buffers]
        # Flat views of the buffers, made once: making them costs more than all that is done with them.
        self._views = [_flat(tensor) for tensor in self._tensors]
        self._shapes = [tensor.shape for tensor in self._tensors]
        self._sizes = [view.numel() for view in self._views]
        first = self._tensors[0]
        self.averaged = first.is_floating_point() or first.is_complex()
        self.size = sum(self._sizes)
        wide = torch.float64 if first.dtype in (torch.float64, torch.complex128) else torch.float32
        self.change = torch.zeros(self.size, dtype=wide, device=first.device)
        self._start = self.change

    @torch.no_grad()
    def begin(self) -> None:
        self._start = self._now()
        self.change.zero_()

    @torch.no_grad()
    def add(self, samples: int, first: bool) -> None:
        if self.averaged:
            self.change.add_(self._now() - self._start, alpha=samples)
        elif first:
            self.change.add_(self._now().to(torch.int64) - self._start.to(torch.int64))
        self._put(self._start)

    @torch.no_grad()
    def undo(self) -> None:
        self._now()  # another tensor may be there now
        self._put(self._start)

    @torch.no_grad()
    def apply(self, total: Tensor, samples: int) -> None:
        if self.averaged:
            self._put(self._start + (total / samples).to(self._start))
        else:
            change = total.round().to(self._start.device, torch.int64)
            self._put((self._start.to(torch.int64) + change).to(self._start.dtype))

    def _now(self) -> Tensor:
        for place, buffer in enumerate(self.buffers):
            tensor = buffer.module._buffers[buffer.key]
            if tensor is not self._tensors[place]:
                self._follow(place, buffer.get())
        return torch.cat(self._views)

    def _follow(self, place: int, tensor: Tensor) -> None:
        """Another tensor is there now."""
        if tensor.shape != self._shapes[place]:
            raise TaskError(
                f"the buffer `{self.buffers[place].name}` changed its shape from {list(self._shapes[place])} to "
                f"{list(tensor.shape)}",
                where="model()",
                fix="Register it with persistent=False if it is a cache; state must keep its shape",
            )
        # A view of one number repeated cannot be written to.
        self._tensors[place] = tensor = tensor.detach().clone(memory_format=torch.contiguous_format)
        self.buffers[place].put(tensor)
        self._views[place] = _flat(tensor)

    def _put(self, flat: Tensor) -> None:
        torch._foreach_copy_(self._views, torch.split(flat, self._sizes))


def _flat(tensor: Tensor) -> Tensor:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.detach().view(-1)


class _Normalise(torch.autograd.Function):
    """y = γ (x − μ) / σ + β with μ and σ² over all workers' samples.

    Each worker contributes (Σ w (x − c), Σ w (x − c)², Σ w) about a shift c that all share (the running mean), in
    float64 and derived from its own mean and centred squares, so that nothing cancels. With n = Σ w over all workers
    and x̂ = (x − μ) / σ the gradient is γ (g − w (Σ g + x̂ Σ g x̂) / n) / σ, where both sums run over all workers'
    samples (Ioffe and Szegedy, "Batch Normalization", ICML 2015, section 3; with w = 1 it is what torch's
    SyncBatchNorm computes).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gamma: Tensor | None,
        beta: Tensor | None,
        shift: Tensor | None,
        weights: Tensor | None,
        eps: float,
        all_reduce: AllReduce,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = x if x.dtype == torch.float64 else x.float()
        count, mean, squares = _moments(wide, weights)
        about = mean if shift is None else mean - shift.double()
        sums = torch.cat([about * count, squares + about.square() * count, count.view(1)])
        all_reduce(sums)
        channels = x.shape[1]
        count = sums[-1].clamp(min=1.0)
        about = sums[:channels] / count
        variance = (sums[channels:-1] / count - about.square()).clamp_(min=0.0)
        mean = about if shift is None else about + shift.double()
        used = (mean.to(wide.dtype), variance.to(wide.dtype))
        y = functional.batch_norm(wide, *used, _as(gamma, wide), _as(beta, wide), False, 0.0, eps)
        ctx.save_for_backward(x, gamma, *used, weights, count)
        ctx.eps, ctx.all_reduce = eps, all_reduce
        total = sums[-1].clone()
        ctx.mark_non_differentiable(mean, variance, total)
        return y.to(x.dtype), mean, variance, total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, gamma, mean, variance, weights, count = ctx.saved_tensors
        wide, grad = x.to(mean.dtype), grad.to(mean.dtype)
        # torch's own backward in evaluation: Σ g x̂ and Σ g with the statistics as given.
        _, of_gamma, of_beta = torch.ops.aten.native_batch_norm_backward(
            grad, wide, None, mean, variance, None, None, False, ctx.eps, [False, True, True]
        )
        of_x = None
        if ctx.needs_input_grad[0]:
            sums = torch.stack([of_gamma, of_beta]).double()
            ctx.all_reduce(sums)
            slope, level = (sums / count).to(mean.dtype)
            through = functional.batch_norm(wide, mean, variance, slope, level, False, 0.0, ctx.eps)
            if weights is not None:
                # A row of weight 0 is in no statistic, so nothing flows back to it through them.
                through.mul_(_by_row(weights, x))
            scale = (variance + ctx.eps).rsqrt()
            factor = scale if gamma is None else scale * gamma.to(scale.dtype)
            of_x = torch.sub(grad, through, out=through).mul_(factor.view(_beside(x))).to(x.dtype)
        return (
            of_x,
            of_gamma.to(gamma.dtype) if gamma is not None else None,
            of_beta.to(gamma.dtype) if gamma is not None else None,
            *(None,) * 4,
        )


def _as(parameter: Tensor | None, like: Tensor) -> Tensor | None:
    return None if parameter is None else parameter.to(like.dtype)


def _beside(x: Tensor) -> list[int]:
    """The shape that one number per channel takes beside `x`."""
    return [1, -1] + [1] * (x.dim() - 2)


def _by_row(weights: Tensor, x: Tensor) -> Tensor:
    """Weights of the samples as weights of the rows of `x`, which may have several rows for each sample."""
    if len(x) != len(weights):
        weights = weights.repeat_interleave(len(x) // max(len(weights), 1))
    return weights.to(x.dtype).view([-1] + [1] * (x.dim() - 1))


def _moments(x: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """This worker's count, mean and sum of squares about its mean, float64: [], [C], [C]."""
    dims = [dim for dim in range(x.dim()) if dim != 1]
    values = x.numel() // x.shape[1]
    by_row = None if weights is None else _by_row(weights, x)
    count = torch.tensor(float(values), dtype=torch.float64, device=x.device)
    if by_row is not None:
        count = by_row.double().sum() * (values // max(len(x), 1))
    # Two passes by hand: torch.var_mean takes ten times as long.
    total = (x if by_row is None else x * by_row).sum(dims).double()
    mean = total / count.clamp(min=torch.finfo(torch.float64).tiny)
    centred = x - mean.to(x.dtype).view(_beside(x))
    squares = centred.square() if by_row is None else centred.square_().mul_(by_row)
    return count, mean, squares.sum(dims).double()


class _GlobalForward(Override):
    """The forward of a BatchNorm module whose statistics are over the global batch."""

    module: _BatchNorm

    def __init__(self, module: _BatchNorm, synchronised: Synchronised, name: str) -> None:
        super().__init__(module)
        self._synchronised = synchronised
        self._name = name

    def __call__(self, input: Tensor) -> Tensor:
        module, x = self.module, input
        if not module.training:
            return self.inner(x)  # type: ignore[no-any-return]
        module._check_input_dim(x)  # type: ignore[no-untyped-call]
        shift = module.running_mean if module.track_running_stats else None
        y, mean, variance, count = _Normalise.apply(  # type: ignore[no-untyped-call]
            x,
            module.weight,
            module.bias,
            shift,
            self._synchronised.weights,
            module.eps,
            self._synchronised.all_reduce,
        )
        values = float(count)
        if values == 1.0:
            raise TaskError(
                f"`{self._name}` gets one value per channel from the whole global batch, which has no variance",
                where="train.batch_norm",
                fix="Raise `train.global_batch`; its last one of an epoch counts too",
            )
        if module.track_running_stats and values > 0:
            _track(module, mean, variance * (values / (values - 1.0)))
        return y  # type: ignore[no-any-return]


@torch.no_grad()
def _track(module: _BatchNorm, mean: Tensor, unbiased: Tensor) -> None:
    """Updates running statistics as torch does: with the unbiased variance."""
    if module.running_mean is None or module.running_var is None:
        return
    assert module.num_batches_tracked is not None
    module.num_batches_tracked.add_(1)
    share = module.momentum if module.momentum is not None else 1.0 / float(module.num_batches_tracked)
    module.running_mean.lerp_(mean.to(module.running_mean.dtype), share)
    module.running_var.lerp_(unbiased.to(module.running_var.dtype), share)


class Synchronised:
    """The modules of a model whose statistics are over the global batch.

    In training every worker must make the same forward and backward passes, one with no samples those of a sample of
    weight 0. In evaluation the modules are the stock ones and nothing is sent.
    """

    def __init__(self, model: nn.Module, all_reduce: AllReduce) -> None:
        self.all_reduce = all_reduce
        self.weights: Tensor | None = None
        for name, module in model.named_modules():
            if isinstance(module, _BatchNorm):
                _GlobalForward(module, self, name).install()

    def set_weights(self, weights: Tensor | None) -> None:
        """Weights of the samples of the next forward passes, shape [B]; None: 1. One of weight 0 enters no
        statistic."""
        self.weights = weights


def synchronise(model: nn.Module, all_reduce: AllReduce) -> Synchronised:
    """Takes the statistics of every BatchNorm module over all workers' samples.

    Args:
        model: its modules keep their names, classes and states.
        all_reduce: adds a float64 tensor up over all workers, in place.
    """
    return Synchronised(model, all_reduce)
