"""What a model gives out, seen where its loss is computed: the classes it tells apart, losses that are no number."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from verbund import objectives
from verbund.data.check import Wanted, too_many_classes
from verbund.data.prepare import Prepared
from verbund.errors import Problem, TaskError
from verbund.job import Job
from verbund.sums import Sums
from verbund.task import Task


class Outputs:
    """Looks on while a task's loss is called.

    Args:
        task: `watched` is the same, looked at.
    """

    def __init__(self, task: Task) -> None:
        self._loss = task.loss
        self.watched = replace(task, loss=self._called)
        self.shape: list[int] = []
        """Of the last output that the loss was called with; empty if it is no tensor."""
        self.not_finite: int | None = None
        """The first sample of the last batch whose loss is not finite."""

    def classes_without_output(self, job: Job, prepared: Prepared, layer: str | None = None) -> list[Problem]:
        """Classes of the data for which the model has no output.

        Args:
            job: the job.
            prepared: its data.
            layer: what makes the output, for the message.
        """
        objective = job.train.objective
        if len(self.shape) < 2 or objective is None:
            return []
        outputs = self.shape[-1] if objective.name == "next_token" else self.shape[1]
        return too_many_classes(prepared, job.data, Wanted.of(job, self.watched.own), outputs, layer)

    def _called(self, output: Any, targets: Any) -> Sums:
        try:
            self.shape = list(objectives.logits(output).shape)
        except TaskError:
            self.shape = []
        sums = self._loss(output, targets)
        bad = (~sums.total.detach().isfinite()).nonzero()
        self.not_finite = int(bad[0]) if len(bad) else None
        return sums
