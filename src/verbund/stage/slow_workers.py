"""Workers that stay slower than the others, told while training goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from verbund.job import Stragglers
from verbund.mesh.axes import Mesh
from verbund.mesh.own_seconds import TOLD

RATIO = 1.5
"""Times as long for a sample as the median of the others."""
WORTH = 0.1
"""The share of a step that the others must lose to it."""
WINDOW_SECONDS, WINDOW_STEPS, WINDOWS = 3.0, 10, 3
"""It must be so in as many windows, one after the other, each of at least so many seconds and steps."""


class SlowWorkers:
    """Looks at what workers tell each other of every step.

    Args:
        mesh: of one of them.
        joint: whether the islands share every global batch.
        members: the number of each worker, by its place in the mesh.
        settings: whether shares go by speed already.
        clock: seconds.
    """

    def __init__(
        self,
        mesh: Mesh,
        joint: bool,
        members: Sequence[int],
        settings: Stragglers | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        axes = ("islands", "data", "shard") if joint else ("data", "shard")
        mine = range(mesh.world) if joint else mesh.peers("data", "shard", "tensor", "pipeline")
        self._ranks: list[list[int]] = [[] for _ in range(mesh.size(*axes))]
        for rank in mine:
            self._ranks[mesh.at(rank).place(*axes)].append(members[rank])
        self._rebalances, self._clock = settings is not None and settings.rebalances, clock
        self._behind = [0] * len(self._ranks)
        self._told: set[int] = set()
        self._begin()

    def _begin(self) -> None:
        self._since, self._steps = self._clock(), 0
        self._samples = [0] * len(self._ranks)
        self._own = [0.0] * len(self._ranks)
        self._data = [0.0] * len(self._ranks)

    def record(self, samples: Sequence[int], told: Sequence[float]) -> list[str]:
        """Takes in a step.

        Args:
            samples: of each worker (of those with the same samples together).
            told: what they told; see `OwnSeconds.end`.

        Returns:
            what is to be said of it now: a sentence on each worker that stays slower, once.
        """
        if len(self._ranks) < 2:
            return []
        self._steps += 1
        for worker, count in enumerate(samples):
            self._samples[worker] += count
            self._own[worker] += told[TOLD * worker]
            self._data[worker] += told[TOLD * worker + 1]
        passed = self._clock() - self._since
        if self._steps < WINDOW_STEPS or passed < WINDOW_SECONDS:
            return []
        notes = [note for worker in range(len(self._ranks)) if (note := self._judged(worker, passed))]
        self._begin()
        return notes

    def _judged(self, worker: int, passed: float) -> str | None:
        others = [other for other in range(len(self._ranks)) if other != worker and self._samples[other]]
        if not others or not self._samples[worker]:
            self._behind[worker] = 0
            return None
        pace = self._own[worker] / self._samples[worker]
        usual = _low([self._own[other] / self._samples[other] for other in others])
        lost = self._own[worker] - _low([self._own[other] for other in others])
        if pace < RATIO * usual or lost < WORTH * passed:
            self._behind[worker] = 0
            return None
        self._behind[worker] += 1
        if self._behind[worker] < WINDOWS or worker in self._told:
            return None
        self._told.add(worker)
        reading = self._data[worker] - _low([self._data[other] for other in others])
        cause = "slow data" if reading > lost / 2 else "slow compute"
        samples = _low([self._samples[other] for other in others])
        if 2 * self._samples[worker] < samples:  # what a step costs beside its samples is most of that
            times = self._own[worker] / max(_low([self._own[other] for other in others]), 1e-12)
            few, many = (round(count / self._steps) for count in (self._samples[worker], samples))
            shares = f"{few} sample{'s' * (few != 1)} to their {many}"
            said = f"{times:.1f} times as slow as the others in a step, with {shares}"
        else:
            said = f"{pace / max(usual, 1e-12):.1f} times slower than the others"
        text = f"{self._named(worker)} {said}: {cause}. It costs {100 * min(lost / passed, 1.0):.0f} % of each step"
        if self._rebalances:
            return f"{text}; without it the others might be faster" if cause == "slow compute" else text
        if cause == "slow compute":
            text += '; with `strategy.stragglers = "rebalance"` it would have fewer samples'
        return text

    def _named(self, worker: int) -> str:
        ranks = self._ranks[worker]
        if len(ranks) == 1:
            return f"worker {ranks[0]} is"
        return f"workers {', '.join(map(str, ranks[:-1]))} and {ranks[-1]} are"


def _low(values: Sequence[float]) -> float:
    """The lower median."""
    return sorted(values)[(len(values) - 1) // 2]
