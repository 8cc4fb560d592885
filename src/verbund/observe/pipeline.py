"""What a run's pipelines did, and what their schedule promised. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from verbund.errors import InputError
from verbund.mesh.pipeline.schedule import Action, actions, idle, simulate, stages
from verbund.observe.blocked import lines
from verbund.observe.events import ACTIONS
from verbund.observe.journal import MICRO_BATCH_BITS, STAGE_BITS, Floats, Ints, ProcessJournal

WARM_UP = 3
"""Steps of a generation that are left out, as far as there are more."""
_SIMULATED = 200_000
_FORWARD, _WEIGHTS = ACTIONS.index("F"), ACTIONS.index("W")


@dataclass(frozen=True)
class Pipelines:
    """The newest generation's pipelines.

    Args:
        whole: per pipeline, shape [actions, 6]: step, kind, stage, micro-batch, start, end, of the steps after the
            warm-up in which every stage took every micro-batch forward and backward.
        comparable: whether the clocks of a pipeline's workers are the same.
    """

    schedule: str
    ranks: int
    chunks: int
    micro_batches: int
    whole: list[Ints]
    comparable: bool

    @property
    def stages(self) -> int:
        return self.ranks * self.chunks


def pipelines(journals: Sequence[ProcessJournal]) -> Pipelines | None:
    """The pipelines of the newest generation; None if it had none, as after a resume under another mesh."""
    for generation in sorted({j.generation for j in journals if j.role == "worker"})[-1:]:
        mine = [j for j in journals if j.generation == generation]
        shapes = (_shape(event) for j in mine for event in j.events if event["name"] == "pipeline")
        shape = next((s for s in shapes if s), None)
        if shape is None:
            continue
        found, comparable = [], True
        for island in sorted({j.island for j in mine}):
            workers = [j for j in mine if j.island == island and j.role == "worker"]
            line = lines([j.actions for j in workers])
            for number in range(int(line.max(initial=-1)) + 1):
                members = [j for j, at in zip(workers, line, strict=True) if at == number]
                comparable &= len({j.host for j in members}) == 1
                found.append(_whole(np.concatenate([j.actions for j in members]), *shape[1:]))
        return Pipelines(*shape, found, comparable)
    return None


def measure(found: Pipelines, samples_per_second: float | None) -> dict[str, Any]:
    """What the summary says of pipelines.

    `bubble` is the share of the workers' time between a step's first and last pass in which they took none:
    `measured`; by `theory` with the mean times that the passes of each stage took; and with `equal_stages`, if all took
    the mean. `first_output_seconds` is the median time after which a step's first micro-batch had left the last stage.
    """
    busy = length = 0
    first: list[int] = []
    for rows in found.whole if found.comparable else []:
        begins, ends, index = steps(rows)
        busy += int((rows[:, 5] - rows[:, 4]).sum())
        length += int((ends - begins).sum())
        out = (rows[:, 1] == _FORWARD) & (rows[:, 2] == found.stages - 1)
        earliest = ends.copy()
        np.minimum.at(earliest, index[out], rows[out, 5])
        first += (earliest - begins).tolist()
    means = _means(found)
    with np.errstate(invalid="ignore"):
        equal = np.repeat(_mean(means), found.stages, axis=1)
    return {
        "schedule": found.schedule,
        "ranks": found.ranks,
        "stages": found.stages,
        "micro_batches": found.micro_batches,
        "bubble": {
            "measured": round(max(1 - busy / (found.ranks * length), 0.0), 6) if length else None,
            "theory": _theory(found, means),
            "equal_stages": _theory(found, equal),
        },
        "first_output_seconds": round(float(np.median(first)) / 1e9, 9) if first else None,
        "samples_per_second": samples_per_second,
        "stage_seconds": [
            {kind: round(float(value), 9) for kind, value in zip(ACTIONS, column, strict=True) if np.isfinite(value)}
            for column in means.T
        ],
    }


def typical(found: Pipelines) -> Ints:
    """The actions of the step of median length of the first pipeline, by start; empty if there is none."""
    rows = found.whole[0] if found.whole and found.comparable else np.empty((0, 6), np.int64)
    if not len(rows):
        return rows
    begins, ends, index = steps(rows)
    median = np.argsort(ends - begins, kind="stable")[len(begins) // 2]
    chosen = np.flatnonzero(index == median)
    step: Ints = rows[chosen[np.argsort(rows[chosen, 4], kind="stable")]]
    return step


def steps(rows: Ints) -> tuple[Ints, Ints, Ints]:
    """Per step its first start and last end, and per row the index of its step."""
    unique, index = np.unique(rows[:, 0], return_inverse=True)
    begins, ends = np.full(len(unique), np.iinfo(np.int64).max), np.zeros(len(unique), np.int64)
    np.minimum.at(begins, index, rows[:, 4])
    np.maximum.at(ends, index, rows[:, 5])
    return begins, ends, index


def _shape(event: dict[str, Any]) -> tuple[str, int, int, int] | None:
    schedule, numbers = event.get("schedule"), [event.get(key) for key in ("ranks", "chunks", "micro_batches")]
    if not isinstance(schedule, str) or not all(type(number) is int for number in numbers):
        return None
    ranks, chunks, micro_batches = (int(number or 0) for number in numbers)
    try:
        count = stages(schedule, ranks, chunks)
    except InputError:
        return None
    if count > 1 << STAGE_BITS or not 0 < micro_batches <= 1 << MICRO_BATCH_BITS:
        return None
    return schedule, ranks, chunks, micro_batches


def _whole(rows: Ints, ranks: int, chunks: int, micro_batches: int) -> Ints:
    rows = rows[rows[:, 2] < ranks * chunks].copy()
    rows[:, 5] += rows[:, 4]
    unique, index = np.unique(rows[:, 0], return_inverse=True)
    expected = ranks * chunks * micro_batches
    forward = np.bincount(index, rows[:, 1] == _FORWARD, minlength=len(unique))
    backward = np.bincount(index, (rows[:, 1] != _FORWARD) & (rows[:, 1] != _WEIGHTS), minlength=len(unique))
    taken = np.flatnonzero((forward == expected) & (backward == expected))
    taken = taken[min(WARM_UP, len(taken) - 1) :] if len(taken) else taken
    kept: Ints = rows[np.isin(index, taken)]
    return kept


def _means(found: Pipelines) -> Floats:
    """Seconds of a pass, by kind and stage, shape [kinds, stages]; NaN where there was none."""
    rows = np.concatenate(found.whole) if found.whole else np.empty((0, 6), np.int64)
    place = rows[:, 1] * found.stages + rows[:, 2]
    size = len(ACTIONS) * found.stages
    sums, counts = np.bincount(place, rows[:, 5] - rows[:, 4], size), np.bincount(place, minlength=size)
    with np.errstate(invalid="ignore", divide="ignore"):
        return (sums / counts / 1e9).reshape(len(ACTIONS), found.stages)


def _mean(means: Floats) -> Floats:
    """Over the stages, shape [kinds, 1]."""
    known = np.isfinite(means)
    mean: Floats = np.where(known, means, 0.0).sum(axis=1, keepdims=True) / known.sum(axis=1, keepdims=True)
    return mean


def _theory(found: Pipelines, means: Floats) -> float | None:
    if not np.isfinite(means[_FORWARD]).all() or found.stages * found.micro_batches > _SIMULATED:
        return None
    costs = np.nan_to_num(means)

    def cost(action: Action) -> float:
        return float(costs[ACTIONS.index(action.kind), action.stage])

    lists = actions(found.schedule, found.ranks, found.chunks, found.micro_batches)
    return round(idle(simulate(lists, cost), found.ranks), 6)
