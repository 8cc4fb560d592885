"""The order: a permutation in every epoch, whatever its shape, and a function of nothing but its arguments."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verbund.data.order import Order
from verbund.data.permutation import SORTED_LIMIT, Permutation


def epoch(order: Order, number: int) -> np.ndarray:
    first = number * order.tickets_per_epoch
    return np.concatenate([order.positions(first + i) for i in range(order.tickets_per_epoch)])


@settings(max_examples=150, deadline=None)
@given(
    size=st.integers(1, 6000),
    batch=st.integers(1, 700),
    block=st.integers(1, 300),
    window=st.integers(1, 60),
    seed=st.integers(0, 2**63 - 1),
    number=st.integers(0, 5),
)
def test_an_epoch_has_every_sample_once(size: int, batch: int, block: int, window: int, seed: int, number: int) -> None:
    order = Order(size, batch, seed, block, window)
    assert np.array_equal(np.sort(epoch(order, number)), np.arange(size))


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 20_000),
    batch=st.integers(1, 500),
    block=st.integers(1, 64),
    window=st.integers(1, 40),
    tickets=st.lists(st.integers(0, 10_000), min_size=1, max_size=8),
)
def test_a_ticket_does_not_depend_on_what_was_asked_before(
    size: int, batch: int, block: int, window: int, tickets: list[int]
) -> None:
    used = Order(size, batch, 3, block, window)
    for ticket in tickets:
        fresh = Order(size, batch, 3, block, window)
        assert np.array_equal(used.positions(ticket), fresh.positions(ticket))
        assert len(fresh.positions(ticket)) == fresh.size(ticket)
        assert fresh.epoch(ticket) == ticket // fresh.tickets_per_epoch


def test_sizes_of_an_uneven_epoch() -> None:
    order = Order(10, 4, 0)
    assert order.tickets_per_epoch == 3
    assert [order.size(ticket) for ticket in range(7)] == [4, 4, 2, 4, 4, 2, 4]


@pytest.mark.parametrize("block", [1, 7])
def test_epochs_and_seeds_differ(block: int) -> None:
    order = Order(5000, 100, 1, block, 8)
    first, second = epoch(order, 0), epoch(order, 1)
    other = epoch(Order(5000, 100, 2, block, 8), 0)
    # Two unrelated permutations agree in about one place.
    assert (first == second).sum() < 12
    assert (first == other).sum() < 12
    assert (first == np.arange(5000)).sum() < 12


def test_blocks_are_read_in_windows() -> None:
    block, window = 16, 4
    order = Order(64 * block, block * window, 5, block, window)
    for ticket in range(order.tickets_per_epoch):
        assert len(np.unique(order.positions(ticket) // block)) == window


def test_a_far_ticket_of_a_huge_set_is_found_at_once() -> None:
    order = Order(10**12, 128, 0, 64, 1024)
    positions = order.positions(7 * 10**9)
    assert len(np.unique(positions)) == 128
    assert positions.min() >= 0
    assert positions.max() < 10**12


def test_refuses_what_is_no_order() -> None:
    for arguments in ((0, 1, 0), (1, 0, 0), (1, 1, 0, 0), (1, 1, 0, 1, 0)):
        with pytest.raises(ValueError, match="at least 1"):
            Order(*arguments)
    with pytest.raises(ValueError, match="ticket"):
        Order(4, 2, 0).positions(-1)


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 1 << 40), seed=st.integers(0, 2**64 - 1), places=st.lists(st.integers(0, 1 << 62), max_size=50)
)
def test_the_inverse_undoes_the_permutation(size: int, seed: int, places: list[int]) -> None:
    permutation = Permutation(size, seed)
    indices = np.array([place % size for place in places], np.int64)
    there = permutation(indices)
    assert ((there >= 0) & (there < size)).all()
    assert np.array_equal(permutation.inverse(there), indices)


@pytest.mark.parametrize("size", [24, SORTED_LIMIT + 1, 3000])
def test_places_are_uniform(size: int) -> None:
    # Chi-square over 12 bins of where each of a few elements goes, and of the distance of two of them.
    trials, bins = 2400, 12
    first = np.stack([Permutation(size, seed)(np.arange(6)) for seed in range(trials)])
    expected = np.bincount(np.arange(size) * bins // size, minlength=bins) / size * trials
    for values in (*first.T, (first[:, 1] - first[:, 0]) % size):
        observed = np.bincount(values * bins // size, minlength=bins)
        if values is not first.T[0] and size == 24 and (values == 0).sum() == 0:
            continue  # a distance is never 0, which a small domain shows
        # 11 degrees of freedom: 37.4 is exceeded by chance once in 10,000.
        assert ((observed - expected) ** 2 / expected).sum() < 37.4


def test_both_halves_of_all_permutations_occur() -> None:
    # A Feistel network over few bits makes even permutations only; small domains must not.
    def odd(permutation: np.ndarray) -> bool:
        seen, cycles = np.zeros(len(permutation), bool), 0
        for start in range(len(permutation)):
            cycles += not seen[start]
            while not seen[start]:
                seen[start] = True
                start = permutation[start]
        return (len(permutation) - cycles) % 2 == 1

    share = np.mean([odd(Permutation(16, seed)(np.arange(16))) for seed in range(400)])
    assert 0.4 < share < 0.6
