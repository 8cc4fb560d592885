"""A replica that evaluates: outputs and losses of batches, with the weights that are to be judged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn

from verbund.data.loader import Batch
from verbund.mesh.divide import Divided
from verbund.mesh.ema import ExponentialMovingAverage
from verbund.mesh.forward import ForwardPass, call
from verbund.sums import Sums
from verbund.task import Task


class Common(Protocol):
    """What keeps another set of the model's weights."""

    def swapped(self) -> AbstractContextManager[None]:
        """Within the block the model has them."""
        ...


class Evaluation:
    """Evaluates and predicts, whatever the division.

    Args:
        model: as this worker has it.
        task: the user's functions.
        divided: which parts of the whole model it holds.
        forward: places columns, and sets the precision.
        local_logits: whether in training each worker keeps its own part of the logits.
        speaks: whether this worker is the one of its data replica's that has the model's outputs.
        ema: the weights' moving average, if the job keeps one.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        divided: Divided,
        forward: ForwardPass,
        local_logits: bool,
        speaks: bool,
        ema: ExponentialMovingAverage | None,
    ) -> None:
        self._model, self._task, self._divided, self._forward = model, task, divided, forward
        self._local_logits, self._speaks, self._ema = local_logits, speaks, ema
        self.common: Common | None = None
        """What has the islands' common weights, where islands train alone."""

    def evaluate(self, batch: Batch) -> tuple[Any, Any, Sums] | None:
        """Output, targets and loss of one evaluation batch, on the worker that has the output, else None; `active`
        decides which weights are used."""
        with torch.inference_mode(), self._forward.autocast():
            columns = self._forward.placed(batch.columns)
            output = self._output(self._task.inputs(columns), batch.ticket)
            if output is None or not self._speaks:
                return None
            targets = self._task.targets(columns)
            return output, targets, self._task.loss(output, targets)

    def predict(self, batch: Batch) -> Any:
        """The model's output for one batch that needs no targets, on the worker that has it, else None."""
        with torch.inference_mode(), self._forward.autocast():
            output = self._output(self._task.inputs(self._forward.placed(batch.columns)), batch.ticket)
        return output if self._speaks else None

    def _output(self, inputs: Any, number: int) -> Any:
        if self._divided.shards is not None:
            self._divided.shards.gather_rest(training=False)
        if self._divided.pipeline is None:
            return call(self._model, inputs)
        return self._divided.pipeline.evaluate(number, lambda: call(self._model, inputs))

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within the block the model evaluates, with its moving-average weights, if the job keeps any, or those that
        islands which train alone have in common."""
        self._model.eval()
        for column in self._divided.columns:
            column.local = False
        judged = next((each.swapped() for each in (self._ema, self.common) if each is not None), nullcontext())
        try:
            with judged:
                yield
        finally:
            if self._divided.pipeline is not None:
                self._divided.pipeline.finish()
            if self._divided.shards is not None:
                self._divided.shards.free()
            for column in self._divided.columns:
                column.local = self._local_logits
