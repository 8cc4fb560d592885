"""How fast workers are, of steps that are noisy, come in bursts, or cost something beside their samples."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from verbund.job import Stragglers
from verbund.mesh.axes import Division, Mesh
from verbund.mesh.balance import Balance
from verbund.mesh.speeds import Speeds

Seconds = Callable[[int, int], float]
"""Of a worker, for so many samples."""


def looked(speeds: Speeds, counts: Sequence[int], seconds: Seconds, steps: int = 10) -> None:
    for _ in range(steps):
        speeds.record(counts, [seconds(worker, count) for worker, count in enumerate(counts)])
    assert speeds.look()


def test_one_worker_that_had_two_shares_tells_what_a_step_costs_all() -> None:
    """Workers 0 to 2 have had one share each, and are not known to cost anything beside it; worker 3 has had two."""
    chance = random.Random(3)
    pace = [0.01, 0.02, 0.01, 0.04]

    def seconds(worker: int, count: int) -> float:
        return pace[worker] * (24 + count) * chance.gauss(1.0, 0.03)

    speeds = Speeds(4, 64.0)
    looked(speeds, [64, 64, 64, 64], seconds)
    assert speeds.fixed == 0.0
    looked(speeds, [64, 64, 64, 20], seconds)
    assert speeds.fixed == pytest.approx(24, rel=0.2)
    assert speeds.paces() == pytest.approx(pace, rel=0.05)
    shares = speeds.shares(0, 4, 256, 1)
    assert sum(shares) == pytest.approx(256)
    took = [pace[worker] * (24 + share) for worker, share in enumerate(shares)]
    assert max(took) < 1.06 * min(took)


def test_noise_at_even_shares_tells_nothing_of_it() -> None:
    chance = random.Random(4)
    speeds = Speeds(4, 64.0)
    for _ in range(30):
        looked(speeds, [64, 64, 64, 64], lambda worker, count: count * chance.uniform(0.5, 1.5))
    assert speeds.fixed == 0.0


def test_who_is_much_slower_has_the_least_and_the_others_end_together() -> None:
    speeds = Speeds(3, 30.0)
    looked(speeds, [30, 30, 30], lambda worker, count: (10 + count) * (1.0, 2.0, 500.0)[worker])
    looked(speeds, [40, 40, 10], lambda worker, count: (10 + count) * (1.0, 2.0, 500.0)[worker])
    fast, slow, slowest = speeds.shares(0, 3, 90, 4)
    assert slowest == 4
    assert fast + slow == pytest.approx(86)
    assert 10 + fast == pytest.approx(2 * (10 + slow), rel=0.05)


# -- quotas ----------------------------------------------------------------------------------------------------------


class Quota:
    """A process that may compute for so many seconds in each period, and what it has not used of one is gone."""

    def __init__(self, share: float, period: float) -> None:
        self.quota, self.period = share * period, period
        self._now, self._left = -1, 0.0

    def done(self, begun: float, work: float) -> float:
        """When so many seconds of a core are done that are begun at a time."""
        now = begun
        while work > 1e-12:
            number = int(now / self.period + 1e-9)
            if number > self._now:
                self._now, self._left = number, self.quota
            part = min(work, self._left, (number + 1) * self.period - now)
            if part > 1e-12:
                now, work, self._left = now + part, work - part, self._left - part
            if work > 1e-12 and (self._left <= 1e-12 or part <= 1e-12):
                now = (number + 1) * self.period
        return now


def samples_per_second(shares: Sequence[float], stragglers: str, seed: int, period: float, fixed: float) -> float:
    """Of the second half of 60 steps of 256 samples."""
    chance = random.Random(seed)
    workers = [Quota(share, period) for share in shares]
    balance = Balance(Mesh(data=len(shares)), Division(len(shares)), Stragglers(name=stragglers), lead=6)
    balance.begin(0, (256,))
    now, ends = chance.random(), []
    for step in range(60):
        counts = balance.counts(step, (256,))
        work = [(fixed + 3e-4 * count) * chance.gauss(1.0, 0.03) * (3 if step == 0 else 1) for count in counts]
        done = [worker.done(now, seconds) for worker, seconds in zip(workers, work, strict=True)]
        balance.record(step, (256,), [each - now for each in done])
        now = max(done) + 5e-4
        ends.append(now)
    return 256 * 29 / (ends[-1] - ends[-30])


@pytest.mark.parametrize("fixed", [0.0, 0.003, 0.008])
@pytest.mark.parametrize("period", [0.02, 0.05, 0.1])
def test_quotas_that_are_given_out_in_bursts(period: float, fixed: float) -> None:
    """Four processes with a tenth of a core, or one of them with a quarter of that, which is to cost 3 parts of 16."""
    found = []
    for seed in range(6):
        alike = samples_per_second([0.1] * 4, "none", seed, period, fixed)
        found.append(samples_per_second([0.1, 0.1, 0.1, 0.025], "rebalance", seed, period, fixed) / alike / (13 / 16))
    assert sum(found) / len(found) > 0.9
