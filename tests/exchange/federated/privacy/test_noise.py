"""The noise has the distribution that is accounted for."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import chisquare, kstest, kurtosis

from verbund.errors import InputError
from verbund.exchange.federated.keystream import Keystream
from verbund.exchange.federated.privacy import noise
from verbund.exchange.federated.privacy.noise import discrete_gaussian, gaussian, source


def probabilities(sigma: float, last: int) -> NDArray[np.float64]:
    weights = np.exp(-(np.arange(-last, last + 1) ** 2) / (2 * sigma**2))
    return weights / weights.sum()


def test_gaussian_noise() -> None:
    values = gaussian(Keystream(bytes(32)), 200_001)
    assert len(values) == 200_001
    assert kstest(values, "norm").pvalue > 1e-4
    assert abs(values.var() - 1.0) < 0.015
    assert abs(kurtosis(values)) < 0.06
    half = len(values) // 2
    assert abs(np.corrcoef(values[:half], values[half : 2 * half])[0, 1]) < 0.015, "both of a pair are independent"


@pytest.mark.parametrize("sigma", [0.3, 1.0, 2.7, 40.0])
def test_noise_on_the_integers(sigma: float) -> None:
    values = discrete_gaussian(Keystream(bytes([1] * 32)), sigma, 100_000)
    last = math.ceil(2.5 * sigma)
    inside = values[np.abs(values) <= last]
    expected = probabilities(sigma, last) * len(inside)
    assert chisquare(np.bincount(inside + last, minlength=2 * last + 1), expected).pvalue > 1e-4
    exact = float((probabilities(sigma, 300) * np.arange(-300, 301) ** 2).sum())
    assert values.var() == pytest.approx(exact, rel=0.03 if sigma > 0.5 else 0.1)


def test_the_table_is_exact() -> None:
    """Cumulated probabilities against sums in 60 digits."""
    from decimal import Decimal, localcontext

    bounds, _ = noise._table(2.5)
    with localcontext() as context:
        context.prec = 60
        each = [(-Decimal(x * x) / (2 * Decimal("2.5") ** 2)).exp() for x in range(-30, 31)]
        total, below = sum(each), Decimal(0)
        for bound, probability in zip(bounds, each, strict=True):
            below += probability
            assert abs(Decimal(bound) / (1 << 128) - below / total) < Decimal(2) ** -126


def test_ties_of_64_bits_are_decided_by_64_more(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds, high = noise._table(1.0)
    place = 10
    assert high[place - 1] < high[place] < high[place + 1]
    low = bounds[place] & (2**64 - 1)

    class Fixed(Keystream):
        def words(self, offset: int, count: int, dtype: Any) -> NDArray[Any]:
            return np.array([high[place]] * 3 + [low - 1, low, low + 1], np.uint64)

    assert discrete_gaussian(Fixed(bytes(32)), 1.0, 3).tolist() == [place - 12, place - 11, place - 11]


def test_noise_of_a_seed_is_a_function_of_it_and_else_nobodys() -> None:
    def draw(*arguments: Any) -> list[float]:
        return list(gaussian(source(*arguments), 3))

    assert draw(7, "local", "a", 1) == draw(7, "local", "a", 1)
    for other in ((8, "local", "a", 1), (7, "central", "a", 1), (7, "local", "a", 2), (7, "local", "b", 1)):
        assert draw(*other) != draw(7, "local", "a", 1)
    assert draw(None, "x") != draw(None, "x")


def test_noise_too_wide_for_its_table_is_refused() -> None:
    with pytest.raises(InputError, match=r"Lower `secure.bits`"):
        discrete_gaussian(Keystream(bytes(32)), 1e6, 1)
