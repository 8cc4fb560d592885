"""The journals of all processes, merged: who computed, communicated and waited when. No torch.

Only together do the journals tell waiting from communicating; `blocked` does.

Intervals of one kind are united, never summed, and each moment of a worker counts for one kind only, the
first that fits of `PRIORITY`. So the kinds add up to the worker's life.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from verbund.observe import blocked, thinning
from verbund.observe.events import NEVER, SPANS, THINNED
from verbund.observe.journal import Ints, ProcessJournal
from verbund.observe.thinning import Eras

KINDS = ("compute", "communicate", "wait", "data", "checkpoint", "validate", "start", "idle")
PRIORITY = ("wait", "communicate", "checkpoint", "data", "compute", "validate", "start")
_OFTEN = frozenset((*THINNED, "wait"))

Who = tuple[int, int]
"""A worker: its island and its rank."""
Intervals = NDArray[np.int64]
"""Shape [n, 2]: start and end in nanoseconds."""


@dataclass
class Life:
    """One worker in one generation.

    Args:
        seconds: per kind of `KINDS`; they add up to `total`. Where hosts' clocks cannot be compared,
            `communicate` includes `wait`.
        intervals: per kind but idle, shape [n, 3]: step, start, end, as recorded (they may overlap).
        steps: how many steps it took part in.
    """

    journal: ProcessJournal
    seconds: dict[str, float] = field(default_factory=dict)
    intervals: dict[str, Ints] = field(default_factory=dict)
    steps: int = 0

    @property
    def who(self) -> Who:
        return (self.journal.island, self.journal.rank)

    @property
    def total(self) -> float:
        """Seconds from birth to the last thing recorded."""
        return (self.journal.end - self.journal.begin) / 1e9


@dataclass
class Timeline:
    """All workers' lives.

    Args:
        lives: by generation, island, rank.
        caused: seconds that the other workers of its island waited for each worker.
        unsplit: seconds blocked in collectives and messages that not all workers recorded; they count as communicating.
        wait_measured: False if workers of one island ran on several hosts, whose clocks are not compared.
        estimated: whether the seconds are extrapolated from a part of the steps (a journal at its limit).
    """

    lives: list[Life]
    caused: dict[Who, float]
    unsplit: float = 0.0
    wait_measured: bool = True
    estimated: bool = False

    @property
    def seconds(self) -> dict[str, float]:
        """Per kind and `total`: the mean over a generation's workers, added over the generations."""
        result = dict.fromkeys(("total", *KINDS), 0.0)
        for lives in _by_generation(self.lives).values():
            workers = len({life.who for life in lives})  # one that was replaced has several lives
            for life in lives:
                result["total"] += life.total / workers
                for kind in KINDS:
                    result[kind] += life.seconds[kind] / workers
        return result

    @property
    def workers(self) -> dict[Who, dict[str, float]]:
        """Per worker, over all generations: seconds per kind, `total`, and `steps`."""
        result: dict[Who, dict[str, float]] = {}
        for life in self.lives:
            sums = result.setdefault(life.who, dict.fromkeys(("total", "steps", *KINDS), 0.0))
            sums["total"] += life.total
            sums["steps"] += life.steps
            for kind in KINDS:
                sums[kind] += life.seconds[kind]
        return dict(sorted(result.items()))


def merge(journals: Sequence[ProcessJournal]) -> Timeline:
    """The timeline of the workers among `journals`."""
    timeline = Timeline([Life(j) for j in journals if j.role == "worker"], {})
    caused: dict[Who, float] = defaultdict(float)
    islands: dict[tuple[int, int], list[Life]] = defaultdict(list)
    for life in timeline.lives:
        islands[life.journal.generation, life.journal.island].append(life)
    for lives in islands.values():
        eras = thinning.eras(life.journal for life in lives)
        timeline.estimated |= len(eras) > 1
        same_host = len({life.journal.host for life in lives}) == 1
        timeline.wait_measured &= same_host
        kept = [thinning.kept(life.journal.actions, eras) for life in lives]
        collectives = blocked.in_collectives(
            [thinning.kept(life.journal.collectives, eras) for life in lives], same_host
        )
        received = [thinning.kept(life.journal.receives, eras) for life in lives]
        receives = blocked.in_receives(received, kept, same_host)
        for number, (life, actions) in enumerate(zip(lives, kept, strict=True)):
            mine = np.concatenate((collectives[number], receives[number]))
            step, begin, split, done, last = mine.T
            factor = thinning.factors(step, eras) / 1e9
            _charge(caused, lives, last, np.where(last == number, 0.0, (split - begin) * factor))
            timeline.unsplit += float(((done - begin) * factor)[last == blocked.UNKNOWN].sum())
            life.intervals = _intervals(life.journal, actions, mine, eras)
            life.seconds = _seconds(life, eras)
            life.steps = _steps(life.journal, eras) if len(life.intervals["compute"]) else 0
    timeline.caused = dict(sorted(caused.items()))
    return timeline


def union(intervals: Intervals) -> Intervals:
    """The same moments as disjoint intervals in order, shape [m, 2]; m ≤ n."""
    intervals = intervals[intervals[:, 1] > intervals[:, 0]]
    if len(intervals) < 2:
        return intervals
    starts, ends = intervals[:, 0], intervals[:, 1]
    if not (starts[1:] >= starts[:-1]).all():
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], ends[order]
    reach = np.maximum.accumulate(ends)
    first = np.empty(len(starts), bool)
    first[0] = True
    np.greater(starts[1:], reach[:-1], out=first[1:])
    begins = np.flatnonzero(first)
    return np.stack((starts[begins], reach[np.append(begins[1:] - 1, len(starts) - 1)]), axis=1)


def _charge(caused: dict[Who, float], lives: list[Life], last: Ints, waited: NDArray[np.float64]) -> None:
    known = last != blocked.UNKNOWN
    for number, seconds in enumerate(np.bincount(last[known], waited[known], minlength=len(lives)).tolist()):
        caused[lives[number].who] += seconds


# -- one worker ----------------------------------------------------------------------------------------------


def _intervals(journal: ProcessJournal, actions: Ints, held_up: Ints, eras: Eras) -> dict[str, Ints]:
    step, begin, split, done, _ = held_up.T
    result = {"wait": _solid(np.stack((step, begin, split), axis=1))}
    for code, kind in enumerate(SPANS):
        rows = journal.spans[journal.spans[:, 0] == code]
        if kind in THINNED:
            rows = thinning.kept(rows, eras, column=1)
        result[kind] = _solid(np.stack((rows[:, 1], rows[:, 2], rows[:, 2] + rows[:, 3]), axis=1))
    moving = _solid(np.stack((step, split, done), axis=1))
    result["communicate"] = np.concatenate((result["communicate"], moving))
    passes = np.stack((actions[:, 0], actions[:, 4], actions[:, 4] + actions[:, 5]), axis=1)
    result["compute"] = np.concatenate((result["compute"], _solid(passes)))
    return result


def _solid(rows: Ints) -> Ints:
    return rows[rows[:, 2] > rows[:, 1]]


def _seconds(life: Life, eras: Eras) -> dict[str, float]:
    """Seconds per kind, each moment counted once; what a thinned journal left out is extrapolated."""
    sums = dict.fromkeys(KINDS, 0.0)
    for number, (first, stride) in enumerate(eras):
        following = eras[number + 1][0] if number + 1 < len(eras) else 1 << 62
        covered = np.empty((0, 2), np.int64)
        length = 0.0
        for kind in PRIORITY:
            rows = life.intervals[kind]
            if len(eras) > 1:
                rows = rows[(rows[:, 0] >= first) & (rows[:, 0] < following)]
            covered = union(np.concatenate((covered, rows[:, 1:])))
            reached = float((covered[:, 1] - covered[:, 0]).sum())
            weight = (0 if stride >= NEVER else stride) if kind in _OFTEN else 1
            sums[kind] += (reached - length) / 1e9 * weight
            length = reached
    recorded = sum(sums.values())
    if len(eras) > 1 and recorded > life.total:
        # The kept steps were slower than the others: the extrapolation may not exceed the life it is about.
        sums = {kind: value * life.total / recorded for kind, value in sums.items()}
        recorded = life.total
    sums["idle"] = max(life.total - recorded, 0.0)
    return sums


def _steps(journal: ProcessJournal, eras: Eras) -> int:
    steps = journal.spans[journal.spans[:, 0] == SPANS.index("compute"), 1]
    kept = np.unique(np.concatenate((steps, journal.actions[:, 0])))
    return len(kept) if len(eras) == 1 else int(kept[-1] - kept[0] + 1)


def _by_generation(lives: Iterable[Life]) -> dict[int, list[Life]]:
    found: dict[int, list[Life]] = defaultdict(list)
    for life in lives:
        found[life.journal.generation].append(life)
    return found
