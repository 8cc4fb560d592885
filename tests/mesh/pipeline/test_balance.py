"""The division of layers: against an exhaustive search."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verbund.mesh.pipeline.balance import balance

whole = st.integers(0, 9)


def _largest(starts: list[int], costs: list[int], first: int, last: int) -> int:
    sums = [sum(costs[begin:end]) for begin, end in pairwise([*starts, len(costs)])]
    sums[0] += first
    sums[-1] += last
    return max(sums)


@given(st.lists(whole, min_size=1, max_size=9), st.integers(1, 9), whole, whole)
@settings(max_examples=300, deadline=None)
def test_no_other_division_is_better(costs: list[int], stages: int, first: int, last: int) -> None:
    stages = min(stages, len(costs))
    found = balance(costs, stages, first, last)
    every = [[0, *cuts] for cuts in combinations(range(1, len(costs)), stages - 1)]
    least = min(_largest(starts, costs, first, last) for starts in every)
    # Of equally good ones, the last stage has the fewest layers, then the one before it, and so on.
    best = max((s for s in every if _largest(s, costs, first, last) == least), key=lambda starts: starts[::-1])
    assert found == best


def test_many_layers_of_uneven_costs() -> None:
    costs = [0.1 * (1 + number % 7) for number in range(200)]
    starts = balance(costs, 16)
    sums = [sum(costs[begin:end]) for begin, end in pairwise([*starts, len(costs)])]
    assert max(sums) <= sum(costs) / 16 + max(costs)


@pytest.mark.parametrize(
    ("costs", "stages", "said"),
    [
        ([1.0, 2.0], 3, "3 stages need as many layers, and there are 2"),
        ([1.0], 0, "0 stages"),
        ([1.0, -1.0], 1, "not negative"),
        ([1.0, float("nan")], 1, "finite"),
    ],
)
def test_what_cannot_be_is_refused(costs: list[float], stages: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        balance(costs, stages)
