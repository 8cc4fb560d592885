"""The forward pass of a micro-batch: the model's output, and its loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from verbund import objectives
from verbund.cluster.worker import describe
from verbund.data.loader import Batch
from verbund.errors import DataError, RunFailed, TaskError, VerbundError
from verbund.job import Train
from verbund.mesh.batch_statistics import Synchronised
from verbund.mesh.pipeline.stages import Boundary
from verbund.mesh.users_line import users_line
from verbund.randomness import SampleRandomness, WorkerRandomness
from verbund.sums import Sums
from verbund.task import Task

_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Loss = Callable[[Any, Any], Sums]


def call(model: Callable[..., Any], inputs: Any) -> Any:
    """Calls the model with a tensor, a tuple or list of arguments, or a dict of named ones."""
    if isinstance(inputs, dict):
        return model(**inputs)
    if isinstance(inputs, (tuple, list)):
        return model(*inputs)
    return model(inputs)


class Tables(Protocol):
    """The model's embedding tables, where they lie elsewhere."""

    @property
    def names(self) -> list[str]:
        """Of their tensors."""
        ...

    def fetch(self, wanted: Mapping[str, Tensor]) -> None:
        """Brings rows, by the module of their table, before the forward pass that uses them."""
        ...


class ForwardPass:
    """The model and its loss, called with micro-batches.

    Args:
        model: what is called, compiled perhaps.
        task: the user's functions.
        loss: the task's, or what computes the same of logits that are divided.
        train: the settings.
        randomness: of what the model draws.
        device: that computes.
        synchronised: what takes batch statistics over the whole global batch, if that is how they are taken.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        task: Task,
        loss: Loss,
        train: Train,
        randomness: SampleRandomness | WorkerRandomness,
        device: torch.device,
        synchronised: Synchronised | None = None,
    ) -> None:
        self.model = model
        self._task, self._loss, self._train = task, loss, train
        self._randomness, self._device, self._synchronised = randomness, device, synchronised
        self.tables: Tables | None = None

    def loss(self, batch: Batch, step: int, run: Callable[[Any], Any] | None = None) -> Any:
        """The loss of a micro-batch; or, where `run` computes a pipeline stage that is not the last, its `Boundary`."""
        phantom = batch.phantom
        if self._synchronised is not None:
            self._synchronised.set_weights(torch.zeros(len(batch.ids), device=self._device) if phantom else None)
        output = targets = None
        try:
            columns = self.placed(batch.columns)
            inputs, targets = self._task.inputs(columns), self._task.targets(columns)
            with self._randomness.active(step, torch.from_numpy(batch.ids)), self.autocast():
                output = call(self.model, inputs) if run is None else run(inputs)
                if isinstance(output, Boundary):
                    return output
                sums = self._loss(output, targets)
        except VerbundError as error:
            raise self._bad_target(output, targets, batch) or error from None
        except Exception as error:
            raise self._bad_target(output, targets, batch) or self._explained(error, batch, step) from error
        if len(sums.total) != len(batch.ids):
            raise TaskError(
                f"the loss has {len(sums.total)} values for a batch of {len(batch.ids)} samples",
                where=str(self._task.file),
                fix="Return one value per sample: the batch must stay dimension 0 of output and targets",
            )
        return Sums(sums.total * 0.0, sums.weight * 0.0) if phantom else sums

    def autocast(self) -> AbstractContextManager[Any]:
        """Within the block torch computes in the job's precision."""
        if self._train.precision in ("fp32", "fp64"):
            return nullcontext()
        return torch.autocast(self._device.type, dtype=_TYPES[self._train.precision])

    def placed(self, columns: dict[str, Tensor]) -> dict[str, Tensor]:
        """The columns on the device that computes; their rows of tables that lie elsewhere have been brought."""
        if self._device.type != "cpu":
            columns = {name: value.to(self._device, non_blocking=True) for name, value in columns.items()}
        if self.tables is not None and self._task.rows is not None:
            self.tables.fetch(self._task.rows(columns))
        return columns

    def _bad_target(self, output: Any, targets: Any, batch: Batch) -> DataError | None:
        """What is wrong with the data, if that is why the loss could not be computed."""
        if self._train.objective is None or targets is None:
            return None
        found = objectives.check_targets(self._train.objective, targets, output, torch.from_numpy(batch.ids))
        return DataError(found, where="data.target") if found else None

    def _explained(self, error: Exception, batch: Batch, step: int) -> RunFailed:
        """The user's exception, with the samples it happened on."""
        described = describe(error)["error"]
        ids = batch.ids
        few = ", ".join(map(str, ids[:4].tolist())) + (f", … {ids[-1]}" if len(ids) > 4 else "")
        return RunFailed(
            f"{described['what']} (step {step}, samples {few})",
            # Layers of torch's own have no line of the user's.
            where=described["where"] if users_line(error.__traceback__) else f"{self._task.file}, model()",
            fix=described["fix"],
        )
