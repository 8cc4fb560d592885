"""What each worker did of its own accord in every step: reading data and computing, not blocked by others. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from verbund.observe.journal import Floats, Ints
from verbund.observe.timeline import Life, Who, union

_PER_STEP = ("compute", "data", "garbage", "samples", "weights")


@dataclass(frozen=True)
class OwnTime:
    """A worker's steps: arrays of shape [steps].

    Args:
        life: the worker, or the last of those that had its place.
        steps: their numbers, in order.
        compute, data, garbage: seconds; `garbage`, pauses for garbage collection, is in neither of the others.
        samples: how many it had.
        weights: of these in the loss; 0 where it does not see the loss.
    """

    life: Life
    steps: Ints
    compute: Floats
    data: Floats
    garbage: Floats
    samples: Floats
    weights: Floats

    @property
    def own(self) -> Floats:
        """Seconds of all kinds."""
        return self.compute + self.data + self.garbage

    @property
    def stage(self) -> int:
        """The first stage of a pipeline that it has; -1 without one."""
        actions = self.life.journal.actions
        return int(actions[:, 2].min()) if len(actions) else -1

    @property
    def seconds_per_sample(self) -> float:
        return float(self.own.sum()) / max(float(self.samples.sum()), 1.0)

    def mean(self, what: str) -> float:
        """Of `own` or any of the arrays, per step."""
        values = getattr(self, what)
        return float(values.mean()) if len(values) else 0.0


def own_times(lives: Sequence[Life]) -> list[OwnTime]:
    """Of the workers of a generation that did a step, in their order."""
    by_who: dict[Who, list[OwnTime]] = defaultdict(list)
    for life in lives:
        mine = _own(life)
        if len(mine.steps):
            by_who[life.who].append(mine)
    return [_joined(by_who[who]) for who in sorted(by_who)]


def _own(life: Life) -> OwnTime:
    """What one process did of its own accord in each step, with no moment in two kinds."""
    journal, found = life.journal, life.intervals
    blocked = union(np.concatenate([found[kind][:, 1:] for kind in ("wait", "communicate", "checkpoint", "validate")]))
    data, compute = found["data"], found["compute"]
    numbers = np.concatenate((data[:, 0], compute[:, 0]))
    steps = np.unique(numbers)

    def per_step(rows: Ints, values: Floats) -> Floats:
        known = np.isin(rows, steps)
        added = np.bincount(np.searchsorted(steps, rows[known]), values[known], minlength=len(steps))
        return added.astype(np.float64)

    pauses = found["garbage"]
    at, length = _within(pauses, np.concatenate((data, compute)))
    without = union(np.concatenate((blocked, pauses[:, 1:])))
    reading = _open(data[:, 1:], without)
    working = _open(compute[:, 1:], union(np.concatenate((without, data[:, 1:]))))
    shares = journal.shares
    return OwnTime(
        life,
        steps,
        compute=per_step(compute[:, 0], working),
        data=per_step(data[:, 0], reading),
        garbage=per_step(at, length),
        samples=per_step(shares[:, 0], shares[:, 1].astype(np.float64)),
        weights=per_step(shares[:, 0], shares[:, 2].astype(np.float64)),
    )


def _open(rows: Ints, blocked: Ints) -> Floats:
    """Seconds of each interval that lie outside of disjoint ones, which are in order."""
    if not len(blocked):
        return (rows[:, 1] - rows[:, 0]) / 1e9
    before = np.concatenate(([0], np.cumsum(blocked[:, 1] - blocked[:, 0])))

    def covered(moments: Ints) -> Ints:
        place = np.searchsorted(blocked[:, 0], moments, side="right")
        last = np.maximum(place - 1, 0)
        inside = np.clip(moments - blocked[last, 0], 0, blocked[last, 1] - blocked[last, 0])
        return np.where(place > 0, before[last] + inside, 0)

    seconds: Floats = (rows[:, 1] - rows[:, 0] - covered(rows[:, 1]) + covered(rows[:, 0])) / 1e9
    return seconds


def _within(pauses: Ints, spans: Ints) -> tuple[Ints, Floats]:
    """The step, and the seconds in it, of each pause that began within a span; those between the steps are left out."""
    spans = spans[np.argsort(spans[:, 1], kind="stable")]
    if not len(spans) or not len(pauses):
        return np.empty(0, np.int64), np.empty(0)
    place = np.searchsorted(spans[:, 1], pauses[:, 1], side="right") - 1
    found = (place >= 0) & (pauses[:, 1] < spans[np.maximum(place, 0), 2])
    at, mine = spans[place[found]], pauses[found]
    return at[:, 0], (np.minimum(mine[:, 2], at[:, 2]) - mine[:, 1]) / 1e9


def _joined(parts: Sequence[OwnTime]) -> OwnTime:
    """The steps of a worker and of those that took its place; of a step done twice the last time counts."""
    if len(parts) == 1:
        return parts[0]
    steps = np.concatenate([part.steps for part in parts])
    _, last = np.unique(steps[::-1], return_index=True)
    rows = len(steps) - 1 - last
    every = {key: np.concatenate([getattr(part, key) for part in parts])[rows] for key in _PER_STEP}
    return OwnTime(parts[-1].life, steps[rows], **every)
