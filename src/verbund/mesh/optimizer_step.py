"""The optimiser's step: the sums of a global batch are divided, unscaled and clipped, and the parameters move."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from verbund.job import Train
from verbund.mesh import schedule
from verbund.mesh.batch_statistics import BufferDeltas
from verbund.mesh.data import GradientSums, StepSums
from verbund.mesh.ema import ExponentialMovingAverage
from verbund.mesh.optimizer import LossScale


class OptimizerStep:
    """What a replica does with the sums of its gradients.

    Args:
        settings: schedule and clipping.
        optimizer: of the replica's parameters.
        sums: hold the gradients.
        buffers: what a step has changed of running statistics.
        loss_scale: of fp16; None: of other precisions.
        ema: the parameters' moving average, if the job keeps one.
        norm: the global norm of gradients, over all workers that hold some.
        agree: returns once all workers have called it, where updates are `atomic`.
    """

    def __init__(
        self,
        settings: Train,
        optimizer: torch.optim.Optimizer,
        sums: GradientSums,
        buffers: BufferDeltas,
        loss_scale: LossScale | None,
        ema: ExponentialMovingAverage | None,
        norm: Callable[[list[Tensor]], float],
        agree: Callable[[], None],
    ) -> None:
        self._settings, self._optimizer, self._sums, self._buffers = settings, optimizer, sums, buffers
        self._loss_scale, self._ema, self._norm, self._agree = loss_scale, ema, norm, agree
        self.atomic = False
        """Whether all agree upon each update: see `take`."""
        self._unconcluded: Callable[[], object] | None = None

    def take(
        self,
        step: int,
        size: int,
        sums: StepSums,
        total_steps: int | None,
        correct: Callable[[], None] | None = None,
    ) -> bool:
        """Divides the sums, clips by the global norm, and takes the optimiser's step.

        Where `atomic`, all workers agree in between that they have all that the update needs: if one is lost, either
        nobody has taken the step, or each that is left has, or can by `conclude`, which needs nobody else.

        Args:
            step: that the learning rate is of.
            size: samples whose gradients were added up.
            sums: of the step's gradients.
            total_steps: of the training, if known.
            correct: changes the gradients before they are used.

        Returns:
            False if the step was left out: an overflow in fp16, or samples of no weight.
        """
        length = self._length(sums)
        if self.atomic:
            self._unconcluded = lambda: self._apply(step, size, sums, total_steps, length, correct)
            self._agree()
            self._unconcluded = None
        return self._apply(step, size, sums, total_steps, length, correct)

    @property
    def ready(self) -> bool:
        """Whether a step was broken off that `conclude` can take."""
        return self._unconcluded is not None

    def conclude(self) -> None:
        """Takes the step upon which the workers were about to agree, as others have."""
        apply, self._unconcluded = self._unconcluded, None
        if apply is not None:
            apply()

    def undo(self) -> None:
        """Puts back what a step that was broken off has changed, unless it is to be concluded."""
        if self._unconcluded is None:
            self._buffers.undo()

    def settle(self, size: int, sums: StepSums, elsewhere: Callable[[], float], clips: bool = True) -> float | None:
        """Gives running statistics what the step has changed, and finds what the gradients must be multiplied by: to be
        divided by the weight, unscaled and clipped.

        Args:
            size: samples whose gradients were added up.
            sums: of the step.
            elsewhere: the squared norm of summed gradients that this replica does not hold: of tables.
            clips: False where these are only a part of the gradient, which others clip.

        Returns:
            The factor; None if the step is to be left out.
        """
        length = self._length(sums) if clips or self._loss_scale is not None else None
        if length is not None:
            length = math.sqrt(length**2 + elsewhere())
        return self._factor(size, sums, length, clips)

    def _apply(
        self,
        step: int,
        size: int,
        sums: StepSums,
        total_steps: int | None,
        length: float | None,
        correct: Callable[[], None] | None,
    ) -> bool:
        """The part of an update that needs nobody else."""
        factor = self._factor(size, sums, length)
        if factor is None:
            return False
        gradients = self._sums.gradients()
        if factor != 1.0 and gradients:
            torch._foreach_mul_(gradients, factor)
        if correct is not None:
            correct()
        schedule.apply(self._optimizer, schedule.factor(self._settings.schedule, step, total_steps))
        self._optimizer.step()
        if self._ema is not None:
            self._ema.update()
        return True

    def _length(self, sums: StepSums) -> float | None:
        """The global norm of the summed gradients; None if nobody asks for it."""
        asked = self._loss_scale is not None or self._settings.clip_norm is not None
        return self._norm(self._sums.gradients()) if asked and sums.weight else None

    def _factor(self, size: int, sums: StepSums, length: float | None, clips: bool = True) -> float | None:
        if size:
            self._buffers.apply(sums.extra, size)
        if sums.weight == 0:
            return None
        factor = size / sums.weight / (self._loss_scale.scale if self._loss_scale else 1.0)
        if length is not None:
            length *= factor
            if self._loss_scale is not None and not self._loss_scale.update(length):
                return None
            if clips and self._settings.clip_norm is not None and length > self._settings.clip_norm:
                factor *= self._settings.clip_norm / length
        return factor
