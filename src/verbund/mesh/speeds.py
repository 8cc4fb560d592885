"""How fast each worker is: the seconds that a step takes it, of so many samples.

A step takes worker i `pace_i · (fixed + samples)` seconds. What it costs beside its samples (the update, the sums, what
a pass costs whatever is in it) is counted in samples and is the same for all, since all run the same code: one worker
that has had two shares tells it of all. Where that is not so, shares still settle where all end together, only later:
a pace is measured at the share that the worker has.

All workers compute this alike from what all know, so it takes operations alone that every processor rounds alike
(+ − × ÷): no logarithm, no sum in an order that depends on the machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NEWEST = 0.5
"""The weight of the last look against that of all before it."""
MOVED = 0.1
"""The part by which a share must have changed to tell what a step costs beside its samples."""
FORGET = 0.95
"""The weight of what former looks told of that, at each look."""
RIDGE = 0.02
"""The weight of knowing nothing of it, which is to take it for 0: that of a step that has become 14 % shorter."""
MOST = 8.0
"""It is taken for so many times an even share at most."""


@dataclass(frozen=True)
class _Point:
    """A point of a worker's line: means of a step."""

    samples: float
    seconds: float


class Speeds:
    """The speeds of all workers, step by step.

    Means of samples and of seconds are averaged together over looks, as they lie on the worker's line, whatever its
    shares were. Where a quota comes in bursts it matters that they are: who has waited has more of it at the next step,
    and looks faster than it is once it waits no more.

    Args:
        workers: how many.
        even: an even share.
    """

    def __init__(self, workers: int, even: float) -> None:
        self.fixed = 0.0
        """What a step costs beside its samples, in samples."""
        self._even = even
        self._known: list[_Point | None] = [None] * workers
        self._former: list[_Point | None] = [None] * workers
        self._moved = self._squares = 0.0
        self._clear()

    def _clear(self) -> None:
        self._steps: list[list[tuple[int, float]]] = [[] for _ in self._known]

    def record(self, samples: Sequence[int], seconds: Sequence[float]) -> None:
        """Takes in a step: of each worker its samples and its own seconds."""
        for steps, count, took in zip(self._steps, samples, seconds, strict=True):
            if count and took > 0:
                steps.append((count, took))

    def look(self) -> bool:
        """Takes in what was recorded since the last look; False if nothing is known of anybody."""
        points = [_point(steps, self.fixed) for steps in self._steps]
        self._clear()
        self._learn_fixed(points)
        for worker, point in enumerate(points):
            if point is not None:
                self._known[worker] = _averaged(self._known[worker], point)
                self._former[worker] = point
        return any(known is not None for known in self._known)

    def paces(self) -> list[float]:
        """Of each worker the seconds of one more sample; who is not known counts as the lower median."""
        fixed = self.fixed
        paces = [known.seconds / (fixed + known.samples) if known is not None else None for known in self._known]
        measured = sorted(pace for pace in paces if pace is not None)
        usual = measured[(len(measured) - 1) // 2]
        return [usual if pace is None else pace for pace in paces]

    def longest(self, samples: Sequence[int]) -> float:
        """The seconds of a step of such shares, which are those of the worker that takes longest."""
        return max(pace * (self.fixed + count) for pace, count in zip(self.paces(), samples, strict=True))

    def shares(self, first: int, last: int, size: int, least: int) -> list[float]:
        """Shares of `size` samples with which the workers `first` to `last` − 1 end together, of `least` or more."""
        paces = self.paces()[first:last]
        least = min(least, size // len(paces))
        few: set[int] = set()
        while True:  # who would have less than the least has that; the others end together with what is left
            others = [at for at in range(len(paces)) if at not in few]
            left = size - least * len(few) + self.fixed * len(others)
            speed = 0.0
            for at in others:
                speed += 1.0 / paces[at]
            found = {at: left / speed / paces[at] - self.fixed for at in others}
            below = {at for at, share in found.items() if share < least}
            if not below or len(below) == len(others):
                return [found.get(at, float(least)) for at in range(len(paces))]
            few |= below

    def _learn_fixed(self, points: Sequence[_Point | None]) -> None:
        """With t = pace · (fixed + n), two points of a worker have (t − t') / mean(t, t') = (n − n') / (fixed + m), m
        being the mean of n and n': an equation for `fixed` alone, solved by least squares over all workers whose shares
        have moved."""
        self._moved, self._squares = self._moved * FORGET, self._squares * FORGET
        for former, point in zip(self._former, points, strict=True):
            if former is None or point is None:
                continue
            samples, seconds = (point.samples + former.samples) / 2, (point.seconds + former.seconds) / 2
            moved, change = point.samples - former.samples, (point.seconds - former.seconds) / seconds
            if abs(moved) >= MOVED * samples and moved * change > 0:
                self._moved += change * (moved - samples * change)
                self._squares += change * change
        self.fixed = min(max(self._moved / (self._squares + RIDGE), 0.0), MOST * self._even)


def _averaged(known: _Point | None, newest: _Point) -> _Point:
    if known is None:
        return newest
    return _Point(
        known.samples + NEWEST * (newest.samples - known.samples),
        known.seconds + NEWEST * (newest.seconds - known.seconds),
    )


def _point(steps: Sequence[tuple[int, float]], fixed: float) -> _Point | None:
    """Of some steps; the slowest is left out, as a pause (a checkpoint, garbage) does not come in each."""
    if not steps:
        return None
    kept = list(steps)
    if len(kept) > 2:
        del kept[max(range(len(kept)), key=lambda at: kept[at][1] / (fixed + kept[at][0]))]
    samples, seconds = 0, 0.0
    for count, took in kept:
        samples, seconds = samples + count, seconds + took
    return _Point(samples / len(kept), seconds / len(kept))
