"""Every sample has exactly one worker and one micro-batch, and units stay whole."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from verbund.mesh.axes import Division

sizes = st.integers(0, 300)


@given(sizes, st.integers(1, 9), st.integers(1, 40), st.integers(0, 20))
def test_each_sample_once(size: int, workers: int, unit: int, micro_batch: int) -> None:
    division = Division(workers, unit, micro_batch)
    seen = [
        i for worker in range(workers) for low, high in division.micro_batches(size, worker) for i in range(low, high)
    ]
    assert seen == list(range(size))


@given(sizes, st.integers(1, 9), st.integers(2, 40))
def test_units_do_not_depend_on_the_workers(size: int, workers: int, unit: int) -> None:
    def passes(count: int) -> list[tuple[int, int]]:
        division = Division(count, unit, 5)
        return [part for worker in range(count) for part in division.micro_batches(size, worker)]

    assert passes(workers) == passes(1)


@given(sizes, st.integers(1, 9))
def test_shares_are_even(size: int, workers: int) -> None:
    lengths = [high - low for low, high in (Division(workers).share(size, w) for w in range(workers))]
    assert max(lengths) - min(lengths) <= 1


@given(st.integers(1, 300), st.integers(1, 9), st.integers(1, 20))
def test_micro_batches_fit_the_memory(size: int, workers: int, micro_batch: int) -> None:
    division = Division(workers, 1, micro_batch)
    assert all(high - low <= micro_batch for w in range(workers) for low, high in division.micro_batches(size, w))
