"""Cross-entropy of logits of which each worker of the axis `tensor` has some classes: the logits are never gathered
(Shoeybi et al., "Megatron-LM", 2019, section 3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from verbund import objectives
from verbund.job import Objective
from verbund.mesh.tensor.exchange import Axis
from verbund.mesh.tensor.layers import Column
from verbund.sums import Sums

Loss = Callable[[Any, Any], Sums]


def vocabulary_parallel(
    loss: Loss, objective: Objective | None, columns: list[Column], axis: Axis | None
) -> Loss | None:
    """The same loss for a model whose last layer leaves its outputs divided; None if it cannot be had so.

    Args:
        loss: of the whole logits, for what turns out not to be divided.
        objective: the job's, unless the task has its own loss.
        columns: the layers that gather their outputs.
        axis: the workers.
    """
    if axis is None or objective is None or len(columns) != 1 or len(columns[0].outputs.sections) != 1:
        return None
    plain = objective.class_weights is None and objective.label_smoothing == 0.0
    if objective.name not in ("cross_entropy", "next_token") or not plain:
        return None
    return _VocabularyParallel(loss, objective, columns[0], axis)


class _VocabularyParallel:
    def __init__(self, loss: Loss, objective: Objective, column: Column, axis: Axis) -> None:
        self._loss = loss
        self._ignored = objective.ignore_index
        self._width = 3 if objective.name == "next_token" else 2
        self._column = column
        self._axis = axis

    def __call__(self, output: Any, targets: Any) -> Sums:
        logits = objectives.logits(output)
        fits = logits.dim() == self._width and isinstance(targets, Tensor) and targets.shape == logits.shape[:-1]
        if not self._column.local or not fits or targets.is_floating_point():
            return self._loss(output, targets)
        ((low, _),) = self._column.outputs.ranges()
        counted = targets != self._ignored
        classes = self._column.outputs.sections[0]
        valid = (targets >= 0) & (targets < classes)
        if bool((counted & ~valid).any()):
            # The ordinary loss finds the words for it.
            return self._loss(logits.new_zeros((*logits.shape[:-1], classes)), targets)
        if logits.dtype in (torch.bfloat16, torch.float16):
            logits = logits.float()
        local: Tensor = _CrossEntropy.apply(logits, targets, low, self._axis)  # type: ignore[no-untyped-call]
        total = (local * counted).reshape(len(targets), -1).sum(1)
        return Sums(total, counted.reshape(len(targets), -1).sum(1).to(total.dtype))


class _CrossEntropy(torch.autograd.Function):
    """log Σ exp(x) − x[target] for logits x [.., local classes] and global targets [..]."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, low: int, axis: Axis) -> Tensor:
        highest = axis.all_reduce(logits.amax(-1), maximum=True)
        weights = (logits - highest.unsqueeze(-1)).exp_()
        local = targets - low
        mine = (local >= 0) & (local < logits.shape[-1])
        local = torch.where(mine, local, 0).unsqueeze(-1)
        chosen = (logits.gather(-1, local).squeeze(-1) - highest) * mine
        total, chosen = axis.all_reduce(torch.stack([weights.sum(-1), chosen]))
        weights /= total.unsqueeze(-1)
        ctx.save_for_backward(weights, local, mine)
        loss: Tensor = total.log() - chosen
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        weights, local, mine = ctx.saved_tensors
        result = weights * gradient.unsqueeze(-1)
        result.scatter_add_(-1, local, -(gradient * mine).unsqueeze(-1))
        return result, None, None, None
