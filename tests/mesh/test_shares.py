"""Shares that go by speed: against the best division that an exhaustive search finds, and in a simulated cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verbund.job import Stragglers
from verbund.mesh.axes import Division, Mesh
from verbund.mesh.balance import Balance

REBALANCE = Stragglers(name="rebalance", every=5)
Seconds = Callable[[int, int, int], float]
"""Of a worker, of so many samples, in a step."""

weights = st.lists(st.integers(1, 1 << 16), min_size=1, max_size=9).map(tuple)


@given(st.integers(0, 300), weights, st.integers(1, 40), st.integers(0, 20))
def test_each_sample_once_with_any_weights(size: int, weights: tuple[int, ...], unit: int, micro_batch: int) -> None:
    division = Division(len(weights), unit, micro_batch, weights=weights)
    passes = [p for worker in range(len(weights)) for p in division.micro_batches(size, worker)]
    assert [i for low, high in passes for i in range(low, high)] == list(range(size))
    assert all(low % unit == 0 for low, _ in passes)
    if -(-size // unit) >= len(weights):
        assert all(low < high for low, high in (division.share(size, worker) for worker in range(len(weights))))


@given(st.integers(9, 300), weights)
def test_shares_are_in_proportion(size: int, weights: tuple[int, ...]) -> None:
    division = Division(len(weights), weights=weights)
    wanted = size * np.array(weights) / sum(weights)
    found = np.array([high - low for low, high in (division.share(size, w) for w in range(len(weights)))])
    if (wanted >= 1.5).all():  # nobody is given the sample that everyone has at least
        assert (np.abs(found - wanted) <= 1).all()


@given(st.integers(0, 300), weights, st.integers(1, 20))
def test_passes_that_are_made_together_fit_the_memory(size: int, weights: tuple[int, ...], micro_batch: int) -> None:
    division = Division(len(weights), 1, micro_batch, weights=weights)
    count = max(division.passes_together((size,)), 1)
    for worker in range(len(weights)):
        passes = division.in_passes(size, worker, count)
        low, high = division.share(size, worker)
        assert [i for a, b in passes for i in range(a, b)] == list(range(low, high))
        assert len(passes) <= count
        assert all(b - a <= micro_batch for a, b in passes)


class Cluster:
    """Workers that take so long, each with a balance of its own."""

    def __init__(
        self,
        seconds: Seconds,
        batch: int,
        islands: int = 1,
        unit: int = 1,
        lead: int = 3,
        **axes: int,
    ) -> None:
        self.seconds = seconds
        mesh = Mesh(0, islands=islands, **axes)
        self.meshes = [Mesh(rank, islands=islands, **axes) for rank in range(mesh.world)]
        self.division = Division(mesh.size("data", "shard"), unit)
        self.balances = [Balance(mesh, self.division, REBALANCE, True, lead) for mesh in self.meshes]
        self.batch, self.islands, self.lead = batch, islands, lead
        self.step = 0
        for balance in self.balances:
            balance.begin(0, self.sizes(0, balance))

    def shares(self, worker: int, step: int) -> tuple[int, int]:
        """The range of a worker's samples in its island's share, and never none of a whole batch."""
        mesh, balance = self.meshes[worker], self.balances[worker]
        size = self.sizes(step, balance)[mesh.island]
        return balance.inside(step).share(size, mesh.place("data", "shard"))

    def sizes(self, step: int, balance: Balance, size: int | None = None) -> tuple[int, ...]:
        division = balance.islands(step)
        shares = (division.share(size or self.batch, island) for island in range(self.islands))
        return tuple(high - low for low, high in shares)

    def run(self, steps: int, size: int | None = None) -> list[int]:
        """Goes on by some steps, and gives each worker's samples of the last one."""
        counts: list[int] = []
        for step in range(self.step, self.step + steps):
            sizes = [self.sizes(step, balance, size) for balance in self.balances]
            assert len(set(sizes)) == 1
            counts = []
            for mesh, balance, mine in zip(self.meshes, self.balances, sizes, strict=True):
                low, high = balance.inside(step).share(mine[mesh.island], mesh.place("data", "shard"))
                counts.append(high - low)
                balance.inside(step + self.lead)  # a loader may ask so far ahead
            assert sum(counts) == (size or self.batch)
            assert counts == self.balances[0].counts(step, sizes[0])
            took = [self.seconds(worker, count, step) for worker, count in enumerate(counts)]
            found = [balance.record(step, sizes[0], took) for balance in self.balances]
            assert all(each == found[0] for each in found)
        self.step += steps
        return counts


def best(seconds: Seconds, batch: int, workers: int) -> float:
    """The shortest step that any division has."""
    shares = (s for s in product(range(1, batch), repeat=workers - 1) if sum(s) < batch)
    return min(max(seconds(w, n, 0) for w, n in enumerate((*share, batch - sum(share)))) for share in shares)


SPEEDS: dict[str, Sequence[float]] = {"even": (1, 1, 1), "one slow": (1, 1, 4), "all others": (1, 2, 5)}


@pytest.mark.parametrize("fixed", [0.0, 3.0])
@pytest.mark.parametrize("name", SPEEDS)
def test_settles_where_an_exhaustive_search_does(name: str, fixed: float) -> None:
    """A step costs a worker so much a sample, and something whatever its share is."""
    pace = SPEEDS[name]

    def seconds(worker: int, count: int, step: int) -> float:
        return fixed * pace[worker] + pace[worker] * count

    cluster = Cluster(seconds, 40, data=3)
    counts = cluster.run(100)
    took = max(seconds(worker, count, 0) for worker, count in enumerate(counts))
    assert took <= best(seconds, 40, 3) + max(pace)  # a share is rounded to a whole sample


def test_follows_a_change_of_speed() -> None:
    slow = {3: 4.0}

    def seconds(worker: int, count: int, step: int) -> float:
        return count * slow.get(worker, 1.0)

    cluster = Cluster(seconds, 130, data=4)
    assert cluster.run(40) == [40, 40, 40, 10]
    slow.clear()
    slow[0] = 2.0
    counts = cluster.run(60)
    assert counts[0] == pytest.approx(130 / 7, abs=2)
    assert counts[3] == pytest.approx(260 / 7, abs=3)


def test_noise_moves_no_samples() -> None:
    random = np.random.default_rng(5)
    cluster = Cluster(lambda worker, count, step: count * random.normal(1.0, 0.04), 128, data=4)
    counts = [cluster.run(5) for _ in range(40)]
    assert counts == [[32] * 4] * 40


def test_short_steps_are_looked_at_together() -> None:
    """Of steps of some milliseconds five are too few to know a speed by."""
    random = np.random.default_rng(5)
    noisy = Cluster(lambda worker, count, step: 1e-4 * count * random.uniform(0.5, 1.5), 128, data=4)
    assert [noisy.run(5) for _ in range(20)] == [[32] * 4] * 20
    slow = Cluster(lambda worker, count, step: 1e-4 * count * (4 if worker == 3 else 1), 130, data=4)
    assert slow.run(400) == [40, 40, 40, 10]


def test_a_pause_moves_no_samples() -> None:
    cluster = Cluster(lambda worker, count, step: count + 500.0 * (worker == 1 and step % 5 == 2), 128, data=4)
    assert cluster.run(50) == [32] * 4


def test_uneven_ends_and_units() -> None:
    cluster = Cluster(lambda worker, count, step: count * (4.0 if worker == 2 else 1.0), 96, unit=8, data=3)
    counts = cluster.run(40)
    assert all(count % 8 == 0 for count in counts)
    assert counts == [40, 48, 8] or counts == [48, 40, 8]
    assert sum(cluster.run(1, size=61)) == 61
    assert sum(cluster.run(1, size=5)) == 5


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 150), st.integers(1, 9))
def test_all_workers_agree_under_any_mesh(islands: int, data: int, shard: int, batch: int, unit: int) -> None:
    pace = np.random.default_rng(islands * 27 + data * 9 + shard).uniform(1, 5, islands * data * shard)
    axes = {"data": data, "shard": shard}
    Cluster(lambda worker, count, step: count * pace[worker], batch, islands, unit, **axes).run(30)


def test_islands_that_share_a_batch() -> None:
    cluster = Cluster(lambda worker, count, step: count * (4.0 if worker == 5 else 1.0), 210, islands=2, data=3)
    assert cluster.run(40) == pytest.approx([40, 40, 40, 40, 40, 10], abs=1)


def test_islands_with_samples_of_their_own_move_none_between_them() -> None:
    balance = Balance(Mesh(islands=2, data=2), Division(2), REBALANCE, joint=True, apart=True)
    balance.begin(0, (50, 50))
    for step in range(60):
        counts = balance.counts(step, (50, 50))
        balance.record(step, (50, 50), [count * (4.0 if worker == 3 else 1.0) for worker, count in enumerate(counts)])
    assert balance.counts(60, (50, 50)) == [25, 25, 40, 10]
    assert balance.islands(60) == Division(2)


def test_everyone_has_a_sample() -> None:
    """A loader that reads ahead must not come to steps beyond those that are known."""
    cluster = Cluster(lambda worker, count, step: count * (900.0 if worker > 2 else 1.0), 24, islands=2, data=3)
    counts = cluster.run(60)
    assert counts[3:] == [1, 1, 1]
    assert all(low < high for low, high in (cluster.shares(worker, 60) for worker in range(6)))


def test_fewer_units_than_workers_are_shared_evenly() -> None:
    cluster = Cluster(lambda worker, count, step: 1.0 + worker, 3, data=4)
    assert cluster.run(30) == [0, 1, 1, 1]


def test_without_the_setting_shares_are_even() -> None:
    balance = Balance(Mesh(data=4), Division(4))
    balance.begin(0, (100,))
    for step in range(100):
        assert balance.record(step, (100,), [1.0, 1.0, 1.0, 9.0]) is None
    assert balance.inside(1000) == Division(4)
