"""Accumulates evaluation batches in a worker, and merges what the workers have.

Bit-identical for any number of workers, since an evaluation batch has a fixed composition whoever takes it,
counts are whole numbers, and floats are kept per batch and combined in the order of the batches, in float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from verbund.errors import RunFailed, TaskError
from verbund.job import Objective
from verbund.metrics.base import Gathered, Metric, Observed, Value, float64, ratio
from verbund.sums import Sums

State = dict[str, NDArray[Any]]
"""Arrays by name, as they travel on the wire: `batches` int64 [n]; `samples` int64 [1]; `counts.NAME` float64
[k]; in the order of `batches`, `rows.NAME` float64 [n, k] and `own.NAME` float64 [n, 2]; and arrays
`gathered.NAME.ARRAY` [N, ...]."""


class Evaluator:
    """One worker's part of an evaluation.

    Memory: counts are kept once, floats are a few numbers a batch; only `roc_auc` keeps something per sample.

    Args:
        metrics: as `build` gives them.
        objective: the job's; None if the task has a loss of its own.
    """

    def __init__(self, metrics: Sequence[Metric | Gathered], objective: Objective | None) -> None:
        self._metrics = list(metrics)
        self._objective = objective
        self.reset()

    def reset(self) -> None:
        """Forgets all batches, for the next evaluation."""
        self._batches: list[int] = []
        self._samples = 0
        self._counts: dict[str, NDArray[np.float64]] = {}
        self._rows: dict[str, list[NDArray[np.float64]]] = {}
        self._own: dict[str, list[NDArray[np.float64]]] = {}
        self._gathered: dict[str, list[dict[str, NDArray[Any]]]] = {}

    def add(
        self,
        batch_index: int,
        output: Any,
        targets: Any,
        sums: Sums,
        ids: Sequence[int] | NDArray[np.int64] | Tensor,
        own: Mapping[str, Sums] | None = None,
    ) -> None:
        """Adds one evaluation batch of B samples.

        Args:
            batch_index: its number among all evaluation batches, from 0.
            output: what the model returned.
            targets: what the loss compared it with.
            sums: the loss per sample.
            ids: the sample ids, [B]; a negative one is padding and not counted as a sample.
            own: what the task's `metrics(output, targets)` returned.

        Raises:
            TaskError: if output, targets or the task's own metrics cannot be read.
        """
        numbers = np.asarray(ids.cpu() if isinstance(ids, Tensor) else ids, dtype=np.int64)
        for name, part in {"loss": sums, **(own or {})}.items():
            if not isinstance(part, Sums) or not (part.total.shape == part.weight.shape == numbers.shape):
                raise TaskError(
                    f"`{name}` is not a `Sums` of a total and a weight for each of {len(numbers)} samples",
                    where="loss()" if part is sums else "metrics()",
                    fix="Return `Sums(total, weight)` with both of shape [B], never a mean",
                )
        self._check_own(own or {})
        seen = Observed(output, targets, sums, self._objective, numbers)
        # Everything is measured before anything is kept: a batch that fails leaves no half of itself behind.
        measured = [
            metric.measure(seen) if isinstance(metric, Metric) else metric.gather(seen) for metric in self._metrics
        ]
        for metric, state in zip(self._metrics, measured, strict=True):
            if isinstance(state, dict):
                self._gathered.setdefault(metric.name, []).append(state)
            elif isinstance(metric, Metric) and metric.exact:
                before = self._counts.get(metric.name)
                self._counts[metric.name] = state if before is None else before + state
            else:
                self._rows.setdefault(metric.name, []).append(state)
        for name, part in (own or {}).items():
            row = np.array([float64(part.total).sum(), float64(part.weight).sum()])
            self._own.setdefault(name, []).append(row)
        self._batches.append(int(batch_index))
        self._samples += int((numbers >= 0).sum())

    def state(self) -> State:
        """What was accumulated, as arrays that can travel."""
        state: State = {
            "batches": np.array(self._batches, np.int64),
            "samples": np.array([self._samples], np.int64),
        }
        state |= {f"counts.{name}": counts for name, counts in self._counts.items()}
        state |= {f"rows.{name}": np.stack(rows) for name, rows in self._rows.items()}
        state |= {f"own.{name}": np.stack(rows) for name, rows in self._own.items()}
        for name, parts in self._gathered.items():
            # How many rows each batch has, so that they can be put in order when they are merged.
            state[f"gathered.{name}.lengths"] = np.array([len(part["ids"]) for part in parts], np.int64)
            for key in parts[0]:
                state[f"gathered.{name}.{key}"] = np.concatenate([part[key] for part in parts])
        return state

    def merge(self, states: Sequence[State], *, batches: int, samples: int) -> dict[str, Value]:
        """The values of all metrics, from the states of all workers in any order.

        Args:
            states: each worker's `state()`.
            batches: how many evaluation batches there are.
            samples: how many samples they hold.

        Returns:
            Values by name: floats, or nested lists (`confusion_matrix`, `precision_per_class`, ...). NaN
            where nothing was counted.

        Raises:
            RunFailed: if a batch is missing or was evaluated twice, or if the samples are not as many.
        """
        indices = np.concatenate([state["batches"] for state in states]) if states else np.zeros(0, np.int64)
        order = np.argsort(indices, kind="stable")
        _check_batches(indices[order], batches)
        counted = sum(int(state["samples"][0]) for state in states)
        if counted != samples:
            raise RunFailed(f"{counted} samples were evaluated, but there are {samples}")
        values: dict[str, Value] = {}
        for metric in self._metrics:
            if isinstance(metric, Gathered):
                values |= metric.finish(_in_order(states, f"gathered.{metric.name}.", order))
            elif metric.exact:
                parts = [state[key] for state in states if (key := f"counts.{metric.name}") in state]
                values |= metric.finish(np.sum(parts, axis=0) if parts else np.zeros(0))
            else:
                rows = _rows(states, f"rows.{metric.name}", order)
                values |= metric.finish(metric.combine(rows) if len(rows) else np.zeros(0))
        for key in dict.fromkeys(key for state in states for key in state if key.startswith("own.")):
            total = np.add.accumulate(_rows(states, key, order), axis=0)[-1]
            values[key.removeprefix("own.")] = ratio(total[0], total[1])
        return values

    def _check_own(self, own: Mapping[str, Sums]) -> None:
        taken = {metric.name for metric in self._metrics}
        if clash := sorted(taken & own.keys()):
            raise TaskError(
                f"`metrics()` returns `{clash[0]}`, which is a metric of the job already",
                where="metrics()",
                fix="Give it another name, or leave that one out of `validate.metrics`",
            )
        if self._batches and own.keys() != self._own.keys():
            before, now = ", ".join(sorted(self._own)), ", ".join(sorted(own))
            raise TaskError(
                f"`metrics()` returned [{before}] for one batch and [{now}] for another",
                where="metrics()",
                fix="Return the same names for every batch; a sample that does not count weighs 0",
            )


def _check_batches(ordered: NDArray[np.int64], batches: int) -> None:
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if twice.size:
        raise RunFailed(f"evaluation batch {twice[0]} was evaluated twice")
    missing = np.setdiff1d(np.arange(batches), ordered)
    if missing.size:
        raise RunFailed(f"evaluation batch {missing[0]} was not evaluated ({missing.size} of {batches} are missing)")
    if ordered.size > batches:
        raise RunFailed(f"evaluation batch {ordered[-1]} was evaluated, but there are only {batches}")


def _rows(states: Sequence[State], key: str, order: NDArray[np.int64]) -> NDArray[np.float64]:
    """The rows of all batches under `key`, in the order of the batches."""
    parts = [state[key] for state in states if len(state["batches"]) and key in state]
    if not parts:
        return np.zeros((0, 0))
    rows = np.concatenate(parts)
    if len(rows) != len(order):
        name = key.partition(".")[2]
        raise RunFailed(
            f"metric `{name}` was measured for {len(rows)} of {len(order)} evaluation batches",
            fix="Return the same names from `metrics()` for every batch" if key.startswith("own.") else None,
        )
    return np.asarray(rows[order])


def _in_order(states: Sequence[State], prefix: str, order: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """The gathered arrays of all batches, in the order of the batches."""
    parts = [state for state in states if f"{prefix}lengths" in state]
    if not parts:
        return {}
    lengths = np.concatenate([part[f"{prefix}lengths"] for part in parts])
    ends = np.cumsum(lengths)
    takes = [np.arange(ends[batch] - lengths[batch], ends[batch]) for batch in order]
    take = np.concatenate(takes) if takes else np.zeros(0, np.int64)
    keys = [key.removeprefix(prefix) for key in parts[0] if key.startswith(prefix)]
    return {key: np.concatenate([part[prefix + key] for part in parts])[take] for key in keys if key != "lengths"}
