"""The split: a function of seed and id, exact on both sides."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verbund.data.hashing import mix, mix_array
from verbund.data.split import Selection, held_out


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 5000), fraction=st.floats(0.0, 0.999), seed=st.integers(0, 2**63 - 1))
def test_the_sides_are_those_of_the_hash(size: int, fraction: float, seed: int) -> None:
    chosen = held_out(np.arange(size), fraction, seed)
    for side in (True, False):
        selection = Selection(size, fraction, seed, validation=side)
        expected = np.flatnonzero(chosen == side)
        assert len(selection) == len(expected)
        assert np.array_equal(selection.select(np.arange(len(selection))), expected)


def test_select_takes_positions_in_any_order() -> None:
    selection = Selection(10_000, 0.3, 5, validation=True)
    positions = np.random.default_rng(0).integers(0, len(selection), 500)
    everything = np.flatnonzero(held_out(np.arange(10_000), 0.3, 5))
    assert np.array_equal(selection.select(positions), everything[positions])
    assert selection.select(np.empty(0, np.int64)).shape == (0,)


@pytest.mark.parametrize("position", [-1, 10_000])
def test_a_position_outside_is_refused(position: int) -> None:
    with pytest.raises(IndexError):
        Selection(100, 0.5, 0, validation=False).select(np.array([position]))


def test_the_share_is_as_asked_and_grows_by_adding() -> None:
    ids = np.arange(200_000)
    small, large = held_out(ids, 0.1, 9), held_out(ids, 0.2, 9)
    # Five standard deviations of a binomial.
    assert abs(small.mean() - 0.1) < 5 * np.sqrt(0.09 / len(ids))
    assert not (small & ~large).any()
    assert not np.array_equal(held_out(ids, 0.1, 10), small)


def test_a_sample_stays_on_its_side_when_the_set_grows() -> None:
    few = Selection(1000, 0.25, 4, validation=True)
    many = Selection(9000, 0.25, 4, validation=True)
    assert np.array_equal(few.select(np.arange(len(few))), many.select(np.arange(len(few))))


def test_split_mix_is_the_published_one() -> None:
    # The first outputs of SplitMix64 with seed 1234567, from the reference implementation's test vector.
    state, outputs = 1234567, []
    for _ in range(3):
        outputs.append(mix(state))
        state += 0x9E3779B97F4A7C15
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    values = np.array([0, 1, 2**64 - 1, 1234567], np.uint64)
    assert mix_array(values).tolist() == [mix(int(value)) for value in values]
