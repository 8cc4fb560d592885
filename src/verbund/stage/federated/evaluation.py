"""Federated validation: exact sums over the clients' own validation parts.

Of a client only sums over all of its samples are told, never those of a batch; they are added in the order of the
clients' names, in float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verbund import metrics
from verbund.errors import InputError
from verbund.job import Job
from verbund.metrics.base import Metric
from verbund.stage.validate import wanted

_SAMPLES, _BATCHES = "samples", "batches"


def check(job: Job) -> None:
    """Whether a job's metrics are sums over samples.

    Raises:
        InputError: if one needs single samples.
    """
    for metric in wanted(job):
        if not isinstance(metric, Metric):
            what = f"`{metric.name}` needs each sample's output, which no client tells"
            raise InputError(what, where="job, validate.metrics", fix="Leave it out")


def summed(job: Job, states: Sequence[Mapping[str, NDArray[Any]]]) -> dict[str, Any]:
    """A client's sums, from the states of its workers' evaluators: lists of numbers by name."""
    known = {metric.name: metric for metric in wanted(job)}
    total: dict[str, Any] = {_SAMPLES: [int(sum(int(state[_SAMPLES][0]) for state in states))]}
    order = np.argsort(np.concatenate([state[_BATCHES] for state in states]), kind="stable")
    for name in sorted({name for state in states for name in state} - {_SAMPLES, _BATCHES}):
        parts = [state[name] for state in states if name in state]
        if name.startswith("counts."):
            total[name] = np.sum(parts, axis=0).tolist()
        elif name.startswith(("rows.", "own.")):
            rows = np.concatenate(parts)[order]
            metric = known.get(name.removeprefix("rows."))
            total[name] = (metric.combine(rows) if isinstance(metric, Metric) else rows.sum(axis=0)).tolist()
        else:
            raise InputError(f"`{name}` are single samples' values, which are not told")
    return total


def merged(job: Job, states: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The values of all metrics over all clients; empty if none has told any.

    Args:
        job: its metrics.
        states: by client what `summed` gave.
    """
    if not states:
        return {}
    evaluator = metrics.Evaluator(wanted(job), job.train.objective)
    rebuilt = []
    samples = 0
    for number, (_, state) in enumerate(sorted(states.items())):
        rows: dict[str, NDArray[Any]] = {_BATCHES: np.array([number], np.int64)}
        samples += int(state[_SAMPLES][0])
        rows[_SAMPLES] = np.array([int(state[_SAMPLES][0])], np.int64)
        for name, values in state.items():
            if name != _SAMPLES:
                array = np.array(values, np.float64)
                rows[name] = array if name.startswith("counts.") else array[None]
        rebuilt.append(rows)
    return evaluator.merge(rebuilt, batches=len(rebuilt), samples=samples)
