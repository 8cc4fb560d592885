"""What a metric is, and one evaluation batch as metrics see it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from verbund import objectives
from verbund.errors import TaskError
from verbund.job import Objective
from verbund.sums import Sums

Value = float | list[Any]
Floats = NDArray[np.float64]

_IGNORED = -100


class Observed:
    """One evaluation batch: output, targets and the loss's sums, on the host, flattened once for all metrics.

    A sample whose loss weighs 0 is padding (or wholly ignored) and counts nowhere; nor do positions whose
    target is the objective's `ignore_index`.

    Args:
        output: what the model returned for B samples.
        targets: what the loss compared it with.
        sums: the loss per sample.
        objective: decides how output and targets are read; None (a loss of the user's own) reads them as
            `cross_entropy` does where classes are needed and as `mean_squared_error` where values are.
        ids: sample ids, shape [B].
    """

    def __init__(
        self, output: Any, targets: Any, sums: Sums, objective: Objective | None, ids: NDArray[np.int64]
    ) -> None:
        self._output = output
        self._targets = targets
        self.sums = sums
        self.objective = objective
        self._ids = ids

    @cached_property
    def loss(self) -> tuple[Floats, Floats]:
        """Total and weight per sample, [B] each, in float64."""
        return float64(self.sums.total), float64(self.sums.weight)

    @cached_property
    def classes(self) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [N, C], class numbers [N] and the index of the sample [N] of the N positions that count.

        Class probabilities as targets stand for their most probable class.

        Raises:
            TaskError: if output and targets are not those of a classification.
        """
        scores = self._scores()
        targets = self._target_tensor()
        if self._name == "next_token":
            scores = scores.movedim(-1, 1)
        if scores.ndim < 2:
            raise _misfit("classes", scores, targets)
        if targets.is_floating_point() and targets.shape == scores.shape:
            targets = targets.argmax(1)
        if targets.ndim == 2 and scores.ndim == 2 and targets.shape[1] == 1:
            targets = targets.squeeze(1)
        if targets.shape != (scores.shape[0], *scores.shape[2:]) or targets.is_floating_point():
            raise _misfit("classes", scores, targets)
        labels = targets.long()
        ignored = self.objective.ignore_index if self.objective else _IGNORED
        counted = labels.ne(ignored)
        counted &= self._kept.view(-1, *([1] * (counted.ndim - 1)))
        rows = self._rows.view(-1, *([1] * (counted.ndim - 1))).expand_as(counted)
        if scores.ndim > 2:
            scores = scores.movedim(1, -1)
        if bool(counted.all()):
            return scores.reshape(-1, scores.shape[-1]), labels.reshape(-1), rows.reshape(-1)
        return scores[counted], labels[counted], rows[counted]

    @cached_property
    def predicted(self) -> Tensor:
        """The most probable class of each position that counts, [N]; the lowest of equals."""
        return self.classes[0].argmax(1)

    @cached_property
    def binary(self) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [N, k] and labels [N, k] (a target above a half is a 1) and the index of the sample [N].

        Raises:
            TaskError: if the shapes differ.
        """
        output, targets = self.values
        return output, targets > 0.5, self._rows[self._kept]

    @cached_property
    def values(self) -> tuple[Tensor, Tensor]:
        """Output and targets of the samples that count, both [N, k], in float64 on the host.

        Raises:
            TaskError: if the shapes differ.
        """
        scores = self._scores()
        if scores.ndim == 0:
            raise _misfit("values", scores, self._target_tensor())
        name = self._name or "mean_squared_error"
        output, targets = objectives.paired(scores, self._target_tensor(), name)
        kept = self._kept
        output = output.reshape(len(output), -1)[kept].double()
        return output, targets.reshape(len(targets), -1)[kept].double()

    def sample_ids(self, rows: Tensor) -> NDArray[np.int64]:
        """The ids of samples by their index in the batch."""
        chosen: NDArray[np.int64] = self._ids[rows.numpy()]
        return chosen

    @property
    def _name(self) -> str | None:
        return self.objective.name if self.objective else None

    @cached_property
    def _kept(self) -> Tensor:
        return self.sums.weight.detach().cpu() != 0

    @cached_property
    def _rows(self) -> Tensor:
        return torch.arange(len(self._ids))

    def _scores(self) -> Tensor:
        return objectives.logits(self._output).detach().cpu()

    def _target_tensor(self) -> Tensor:
        if not isinstance(self._targets, Tensor):
            raise TaskError(
                f"metrics by name need targets as one tensor, not a `{type(self._targets).__name__}`",
                where="targets",
                fix="Give the task its own `metrics(output, targets)`",
            )
        return self._targets.detach().cpu()


class Metric(ABC):
    """One metric: what it takes from a batch, how that adds up, and what it makes of the whole.

    `measure` gives k numbers a batch. Where `exact`, they are whole counts, which add up to the same in any
    order; else they are floats, which are kept per batch and combined in the order of the batches.
    """

    name: str
    exact: ClassVar[bool] = False

    @abstractmethod
    def measure(self, seen: Observed) -> Floats:
        """The state of one batch, [k], the same k for every batch."""

    def combine(self, rows: Floats) -> Floats:
        """The states of all batches [n, k], in order, as one [k]. n is at least 1."""
        return np.asarray(np.add.accumulate(rows, axis=0)[-1])  # one after another; `sum` adds in pairs

    @abstractmethod
    def finish(self, total: Floats) -> dict[str, Value]:
        """The metric's values by name; `total` is [k], or [0] if there was no batch."""


class Share(Metric):
    """A metric that is one sum over another; its state is the two of them."""

    def finish(self, total: Floats) -> dict[str, Value]:
        return {self.name: ratio(*total) if total.size else float("nan")}


class Gathered(ABC):
    """A metric that no sums can hold: it keeps what it needs of every sample, in its own types."""

    name: str

    @abstractmethod
    def gather(self, seen: Observed) -> dict[str, NDArray[Any]]:
        """Arrays of one batch whose first dimension is the same; `ids` among them."""

    @abstractmethod
    def finish(self, gathered: dict[str, NDArray[Any]]) -> dict[str, Value]:
        """The metric's values by name, from the arrays of all batches, in order; {} if there was no batch."""


def float64(tensor: Tensor) -> Floats:
    """A tensor's values in float64 on the host, where numpy adds them the same way for any number of
    threads."""
    return tensor.detach().cpu().double().numpy()


def ratio(total: float, weight: float) -> float:
    """`total / weight`, and NaN where nothing was counted."""
    return float(total / weight) if weight else float("nan")


def _misfit(wanted: str, output: Tensor, targets: Tensor) -> TaskError:
    return TaskError(
        f"no metric over {wanted} can compare an output {list(output.shape)} with targets "
        f"{list(targets.shape)} of type {targets.dtype}",
        where="validate.metrics",
        fix="Leave such metrics out, or give the task its own `metrics(output, targets)`",
    )
