"""Batch statistics (BatchNorm and its kin) that do not depend on how a global batch is divided.

Over groups: every forward pass is a group of fixed composition, so the stock modules do; what is left are the running
statistics, which `BufferDeltas` averages over the groups. Over the whole global batch: `synchronise` replaces the
modules'
forward by one whose statistics are all-reduced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

AllReduce = Callable[[Tensor], None]


def has_batch_statistics(model: nn.Module) -> bool:
    """Whether what the model computes for a sample depends on the others of its forward pass."""
    return any(isinstance(module, _BatchNorm) for module in model.modules())


class BufferDeltas:
    """Makes what training forwards do to buffers (running statistics) independent of the division.

    At a step's start the buffers have a value R. Every forward pass starts from R; the change it makes is weighted by
    its samples. After the step a floating-point buffer is R + Σ nᵢ·Δᵢ / Σ nᵢ, and an integer one (a counter) R + Δ of
    the pass that had the first samples of the global batch. For one forward pass of the whole batch that is exactly
    what the module itself would have done.

    Args:
        model: its buffers.
    """

    def __init__(self, model: nn.Module) -> None:
        changing = [
            buffer
            for module in model.modules()
            if getattr(module, "track_running_stats", True) is not False
            for buffer in module.buffers(recurse=False)
        ]
        unique = list({id(buffer): buffer for buffer in changing}.values())
        # A model without normalisation has constants for buffers (masks, positions): nothing to watch.
        watched = unique if _changes_buffers(model) else []
        self._buffers = watched
        self._start: list[Tensor] = []
        self._changes = torch.zeros(sum(buffer.numel() for buffer in watched))
        self._first = False
        self.size = self._changes.numel()

    def begin(self, first: bool) -> None:
        """Remembers the values at the step's start.

        Args:
            first: whether this worker has the first samples of the global batch.
        """
        if self._buffers:
            self._start = [buffer.detach().clone() for buffer in self._buffers]
            self._changes.zero_()
            self._first = first

    def add(self, samples: int) -> None:
        """Takes in what one forward pass of `samples` samples has changed, and puts the values back."""
        if not self._buffers:
            return
        place = 0
        with torch.no_grad():
            for buffer, start in zip(self._buffers, self._start, strict=True):
                part = self._changes[place : place + buffer.numel()].view(buffer.shape)
                change = (buffer - start).to(part.dtype).to(part.device)
                if buffer.is_floating_point():
                    part.add_(change, alpha=samples)
                elif self._first:
                    part.add_(change)
                buffer.copy_(start)
                place += buffer.numel()
        self._first = False

    def flat(self) -> Tensor:
        """The changes of this worker as one vector, to be added up over the workers; shape [size], float32."""
        return self._changes

    def apply(self, total: Tensor, samples: int) -> None:
        """Gives the buffers their values after the step.

        Args:
            total: the sum of all workers' `flat`.
            samples: those of the global batch.
        """
        place = 0
        with torch.no_grad():
            for buffer in self._buffers:
                change = total[place : place + buffer.numel()].view(buffer.shape)
                if buffer.is_floating_point():
                    buffer.add_(change.to(buffer.device, buffer.dtype), alpha=1.0 / samples)
                else:
                    buffer.add_(change.round().to(buffer.device, buffer.dtype))
                place += buffer.numel()


def _changes_buffers(model: nn.Module) -> bool:
    return any(
        isinstance(module, (_BatchNorm, nn.modules.instancenorm._InstanceNorm)) and module.track_running_stats
        for module in model.modules()
    )


class _Normalise(torch.autograd.Function):
    """y = (x − μ) / σ with μ and σ² over all workers' samples.

    With weights wᵢ per row and n = Σ wᵢ over all workers, the gradient is
    (g − Σ w g / n − x̂ Σ w g x̂ / n) / σ (Ioffe and Szegedy, "Batch Normalization", ICML 2015, section 3), where both
    sums run over all workers' samples.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, eps: float, all_reduce: AllReduce
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dims = [dim for dim in range(x.dim()) if dim != 1]
        shape = [1, -1] + [1] * (x.dim() - 2)
        spread = weights.view([-1] + [1] * (x.dim() - 1))
        inner = x[0, 0].numel()
        # Two rounds, mean first: the variance is then a sum of squares about the mean, which does not cancel.
        first = torch.cat([(x.double() * spread).sum(dims), weights.double().sum().view(1) * inner])
        all_reduce(first)
        count = first[-1].clamp(min=1.0)
        mean = first[:-1] / count
        centred = x.double() - mean.view(shape)
        second = (centred.square() * spread).sum(dims)
        all_reduce(second)
        variance = second / count
        scale = (variance + eps).rsqrt()
        normal = (centred * scale.view(shape)).to(x.dtype)
        ctx.save_for_backward(normal, scale.to(x.dtype), weights, count)
        ctx.all_reduce = all_reduce
        ctx.mark_non_differentiable(mean, variance, count)
        return normal, mean, variance, count

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor, None, None, None]:
        normal, scale, weights, count = ctx.saved_tensors
        dims = [dim for dim in range(grad.dim()) if dim != 1]
        shape = [1, -1] + [1] * (grad.dim() - 2)
        spread = weights.view([-1] + [1] * (grad.dim() - 1))
        sums = torch.stack([grad.double().sum(dims), (grad.double() * normal).sum(dims)])
        ctx.all_reduce(sums)
        sums = sums / count
        mean_grad, mean_product = (part.to(grad.dtype).view(shape) for part in sums)
        # A row of weight 0 is in no statistic, so nothing flows back to it through them.
        through = (mean_grad + normal * mean_product) * spread
        return (grad - through) * scale.view(shape), None, None, None


class Synchronised:
    """The modules of a model whose statistics are over the global batch."""

    def __init__(self, model: nn.Module, all_reduce: AllReduce) -> None:
        self._weights: Tensor | None = None
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                self._replace(module, all_reduce)

    def set_weights(self, weights: Tensor | None) -> None:
        """Weights of the rows of the next forward passes, shape [B]; None: 1. A row of weight 0 enters no statistic."""
        self._weights = weights

    def _replace(self, module: _BatchNorm, all_reduce: AllReduce) -> None:
        stock = module.forward

        def forward(x: Tensor) -> Tensor:
            if not (module.training or not module.track_running_stats):
                return stock(x)
            weights = self._weights if self._weights is not None else x.new_ones(len(x))
            normal: Tensor
            normal, mean, variance, count = _Normalise.apply(x, weights, module.eps, all_reduce)  # type: ignore[no-untyped-call]
            if module.training and module.track_running_stats:
                _track(module, mean, variance, count)
            if module.weight is None:
                return normal
            shape = [1, -1] + [1] * (x.dim() - 2)
            return normal * module.weight.view(shape) + module.bias.view(shape)

        module.forward = forward  # type: ignore[method-assign, assignment]


def _track(module: _BatchNorm, mean: Tensor, variance: Tensor, count: Tensor) -> None:
    """Updates running statistics as torch does: with the unbiased variance."""
    assert module.running_mean is not None
    assert module.running_var is not None
    assert module.num_batches_tracked is not None
    with torch.no_grad():
        module.num_batches_tracked.add_(1)
        share = module.momentum if module.momentum is not None else 1.0 / float(module.num_batches_tracked)
        unbiased = variance * (count / (count - 1).clamp(min=1.0))
        module.running_mean.lerp_(mean.to(module.running_mean.dtype), share)
        module.running_var.lerp_(unbiased.to(module.running_var.dtype), share)


def synchronise(model: nn.Module, all_reduce: AllReduce) -> Synchronised:
    """Takes the statistics of every BatchNorm module over all workers' samples.

    Args:
        model: its modules keep their names and states.
        all_reduce: adds a float64 tensor up over all workers, in place.
    """
    return Synchronised(model, all_reduce)
