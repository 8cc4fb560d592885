"""Partitions: each sample is exactly one client's, and a partition is a function of the seed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verbund.errors import InputError
from verbund.exchange.federated.cohort import sampled
from verbund.exchange.federated.partition import Parts, alike, divide
from verbund.job import Partition


def whole(parts: Parts, samples: int, minimum: int = 1) -> None:
    np.testing.assert_array_equal(np.sort(parts.order), np.arange(samples))
    assert parts.starts[0] == 0
    assert parts.starts[-1] == samples
    assert parts.sizes.min() >= minimum


def labels(seed: int, samples: int, count: int = 10) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, count, samples)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(["iid", "dirichlet", "shards", "power", "exponential"]),
    clients=st.integers(1, 40),
    more=st.integers(0, 300),
    seed=st.integers(0, 2**63 - 1),
    alpha=st.sampled_from([0.01, 0.3, 1.0, 100.0]),
    minimum=st.integers(0, 3),
)
def test_each_sample_is_exactly_one_clients(
    name: str, clients: int, more: int, seed: int, alpha: float, minimum: int
) -> None:
    samples = clients * max(minimum, 2) + more
    how = Partition.model_validate({"name": name, "alpha": alpha, "minimum": minimum})
    values = labels(seed % 1000, samples)
    parts = divide(how, clients, seed, samples, values)
    assert parts.clients == clients
    whole(parts, samples, 1 if name in ("iid", "shards") else max(minimum, 1))
    again = divide(how, clients, seed, samples, values)
    np.testing.assert_array_equal(parts.order, again.order)


@settings(max_examples=40, deadline=None)
@given(clients=st.integers(5, 40), k=st.integers(2, 10), seed=st.integers(0, 2**63 - 1))
def test_pathological_clients_have_so_many_labels(clients: int, k: int, seed: int) -> None:
    values = labels(seed % 1000, 3000)
    parts = divide(Partition(name="pathological", labels=k), clients, seed, 3000, values)
    whole(parts, 3000)
    assert all(len(np.unique(values[parts.of(client)])) == k for client in range(clients))


def test_another_seed_is_another_partition() -> None:
    values = labels(0, 500)
    for name in ("iid", "dirichlet", "shards", "pathological", "power", "exponential"):
        how = Partition.model_validate({"name": name})
        one, other = (divide(how, 10, seed, 500, values) for seed in (1, 2))
        assert not np.array_equal(one.order, other.order), name


def test_a_small_alpha_makes_clients_differ() -> None:
    values = labels(0, 5000)

    def largest_share(alpha: float) -> float:
        parts = divide(Partition(name="dirichlet", alpha=alpha), 20, 3, 5000, values)
        shares = [np.bincount(values[parts.of(c)], minlength=10).max() / parts.sizes[c] for c in range(20)]
        return float(np.mean(shares))

    assert largest_share(0.05) > 0.6 > 0.2 > largest_share(100.0)


def test_dirichlet_proportions_do_not_depend_on_the_number_of_samples() -> None:
    """So that a validation set can be divided to each client's taste."""
    big, small = np.repeat(np.arange(4), 2500), np.repeat(np.arange(4), 500)
    how = Partition(name="dirichlet", alpha=0.5)

    def shares(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        parts = divide(how, 5, 11, len(values), values)
        return np.array([np.bincount(values[parts.of(c)], minlength=4) / (len(values) / 4) for c in range(5)])

    np.testing.assert_allclose(shares(big), shares(small), atol=0.01)


def test_other_samples_to_each_clients_taste() -> None:
    values, others = labels(1, 4000), labels(2, 1000)
    for name in ("dirichlet", "pathological", "shards"):
        parts = divide(Partition.model_validate({"name": name}), 10, 7, 4000, values)
        theirs = alike(parts, values, others, 7)
        assert theirs.clients == 10
        whole(theirs, 1000, 0)
        for client in range(10):
            mine = np.bincount(values[parts.of(client)], minlength=10) / 4
            like = np.bincount(others[theirs.of(client)], minlength=10)
            np.testing.assert_allclose(like, mine, atol=6)  # labels are not quite as frequent in both
    column = divide(Partition(name="column", column="x"), None, 7, 4000, values)
    theirs = alike(column, values, others, 7)
    assert all((others[theirs.of(client)] == client).all() for client in range(10))
    strange = alike(column, values, np.full(100, 99), 7)
    whole(strange, 100, 0)


def test_sizes_by_power_law_and_exponentially() -> None:
    power = divide(Partition(name="power", alpha=1.0), 10, 0, 10_000).sizes
    np.testing.assert_allclose(power / power[0], 1 / np.arange(1, 11), atol=0.01)
    falling = divide(Partition(name="exponential", alpha=0.5), 6, 0, 10_000).sizes
    np.testing.assert_allclose(falling[1:] / falling[:-1], np.exp(-0.5), atol=0.01)


def test_a_column_says_who_has_what() -> None:
    values = np.array([3, 1, 3, 7, 1, 3])
    parts = divide(Partition(name="column", column="hospital"), None, 0, 6, values)
    assert [parts.of(c).tolist() for c in range(3)] == [[1, 4], [0, 2, 5], [3]]


@pytest.mark.parametrize(
    ("how", "clients", "samples", "what"),
    [
        ({"name": "iid"}, 20, 10, "too few for 20 clients"),
        ({"name": "dirichlet", "minimum": 5}, 20, 90, "at least 5 each"),
        ({"name": "pathological", "labels": 2}, 3, 500, "cannot have all samples of 10 labels"),
        ({"name": "pathological", "labels": 11}, 30, 500, "cannot have all"),
        ({"name": "shards", "labels": 50}, 9, 400, "cannot be cut into 450 shards"),
        ({"name": "column", "column": "y"}, 4, 100, "10 values, and `clients` is 4"),
        ({"name": "iid"}, None, 100, "how many clients"),
    ],
)
def test_what_cannot_be_divided_is_refused(how: dict[str, Any], clients: int | None, samples: int, what: str) -> None:
    with pytest.raises(InputError, match=what):
        divide(Partition.model_validate(how), clients, 0, samples, labels(1, samples))


def test_cohorts_are_a_function_of_seed_and_round_and_everybody_is_as_likely() -> None:
    counts = np.zeros(30)
    for round_ in range(3000):
        cohort = sampled(5, round_, 30, 6)
        assert cohort == sampled(5, round_, 30, 6) == sorted(set(cohort))
        assert len(cohort) == 6
        counts[cohort] += 1
    # Binomial with mean 600 and a standard deviation of 22.
    assert abs(counts - 600).max() < 5 * 22
    assert sampled(5, 0, 30, 6) != sampled(6, 0, 30, 6)
    assert sampled(5, 3, 7, 7) == list(range(7))
