"""Workers that stay slower than the others, told while training goes on. No torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from verbund.job import Strategy

RATIO = 1.5
"""Times as long for a sample as the median of the others."""
WORTH = 0.1
"""The share of a step that the others must lose to it."""
WINDOW_SECONDS, WINDOW_STEPS, WINDOWS = 3.0, 10, 3
"""It must be so in as many windows, one after the other, in each of which all have done so many steps at least."""
_GONE_SECONDS = 60.0
"""Who has told nothing for so long takes part no more."""


@dataclass
class _Pace:
    """What a worker, or those with the same samples together, did in a window."""

    ranks: tuple[int, ...]
    heard: float
    steps: int = 0
    samples: int = 0
    own: float = 0.0
    data: float = 0.0
    behind: int = 0
    told: bool = False

    def begin(self) -> None:
        self.steps = self.samples = 0
        self.own = self.data = 0.0

    def each(self, what: str) -> float:
        """`samples`, `own` or `data` of a step."""
        return float(getattr(self, what)) / max(self.steps, 1)


class SlowWorkers:
    """Looks at what workers tell of their steps; see `Paces`.

    Args:
        strategy: of the job.
        clock: seconds.
    """

    def __init__(self, strategy: Strategy, clock: Callable[[], float] = time.monotonic) -> None:
        self._rebalances = strategy.stragglers.rebalances
        self._can_rebalance = strategy.exchange.name == "all_reduce"
        self._waits = not strategy.exchange.served or strategy.exchange.divided
        self._clock = clock
        self._paces: dict[tuple[int, ...], _Pace] = {}
        self._since = clock()

    def record(self, rows: Sequence[Sequence[Any]]) -> list[str]:
        """Takes in some workers' steps since they were last heard of.

        Returns:
            what is to be said of it now: a sentence on each worker that stays slower, once.
        """
        now = self._clock()
        for ranks, steps, samples, own, data in rows:
            pace = self._paces.setdefault(tuple(ranks), _Pace(tuple(ranks), now))
            pace.heard = now
            pace.steps, pace.samples = pace.steps + steps, pace.samples + samples
            pace.own, pace.data = pace.own + own, pace.data + data
        self._paces = {key: pace for key, pace in self._paces.items() if now - pace.heard < _GONE_SECONDS}
        passed = now - self._since
        if passed < WINDOW_SECONDS or any(pace.steps < WINDOW_STEPS for pace in self._paces.values()):
            return []
        notes = [note for pace in self._paces.values() if (note := self._judged(pace, passed))]
        for pace in self._paces.values():
            pace.begin()
        self._since = now
        return notes

    def _judged(self, mine: _Pace, passed: float) -> str | None:
        others = [pace for pace in self._paces.values() if pace is not mine and pace.samples]
        if not others or not mine.samples:
            mine.behind = 0
            return None
        times = mine.own / mine.samples / max(_low([pace.own / pace.samples for pace in others]), 1e-12)
        lost = mine.each("own") - _low([pace.each("own") for pace in others])
        share = min(max(lost * mine.steps / passed, 0.0), 1.0)
        if times < RATIO or (self._waits and share < WORTH):
            mine.behind = 0
            return None
        mine.behind += 1
        if mine.behind < WINDOWS or mine.told:
            return None
        mine.told = True
        reading = mine.each("data") - _low([pace.each("data") for pace in others])
        return self._sentence(mine, others, times, share, "slow data" if reading > lost / 2 else "slow compute")

    def _sentence(self, mine: _Pace, others: Sequence[_Pace], times: float, share: float, cause: str) -> str:
        few, many = mine.each("samples"), _low([pace.each("samples") for pace in others])
        said = f"{times:.1f} times slower than the others"
        if 2 * few < many:  # what a step costs beside its samples is most of that
            slower = mine.each("own") / max(_low([pace.each("own") for pace in others]), 1e-12)
            shares = f"{few:.0f} sample{'s' * (round(few) != 1)} to their {many:.0f}"
            said = f"{slower:.1f} times as slow as the others in a step, with {shares}"
        text = f"{_named(mine.ranks)} {said}: {cause}."
        if not self._waits:
            return f"{text} The others do not wait for it"
        text += f" It costs {100 * share:.0f} % of each step"
        if cause == "slow compute" and self._rebalances:
            text += "; without it the others might be faster"
        elif cause == "slow compute" and self._can_rebalance:
            text += '; with `strategy.stragglers = "rebalance"` it would have fewer samples'
        return text


def _named(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"worker {ranks[0]} is"
    return f"workers {', '.join(map(str, ranks[:-1]))} and {ranks[-1]} are"


def _low(values: Sequence[float]) -> float:
    """The lower median."""
    return sorted(values)[(len(values) - 1) // 2]
