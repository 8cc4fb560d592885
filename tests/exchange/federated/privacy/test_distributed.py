"""Noise in shares, under secure aggregation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from exchange.federated.secure.rounds import Federation, Play
from verbund.errors import InputError
from verbund.exchange.federated.privacy import Accountant, DistributedPrivacy
from verbund.exchange.federated.secure import Sum
from verbund.job import Privacy, Secure


def privacy_of(length: int, clients: int, least: int, noise: float = 1.0, **secure: object) -> DistributedPrivacy:
    return DistributedPrivacy(
        Privacy(kind="distributed", noise=noise), Secure.model_validate(secure), length, clients, least
    )


def test_with_the_fewest_clients_there_is_as_much_noise_as_is_said() -> None:
    """Through masks and drop-outs: the mean error is that of the noise, and its size that of the survivors' shares."""
    length, clients = 20_000, 10
    federation = Federation(clients, length, {"colluding": 0.1})
    privacy = privacy_of(length, clients, federation.round().least, colluding=0.1)
    federation = Federation(clients, length, {"colluding": 0.1}, headroom=privacy.headroom)
    random = np.random.default_rng(0)
    vectors = {name: random.normal(size=length) / math.sqrt(length) for name in federation.names}
    noisy = {name: privacy.integers(vector, name, 0) for name, vector in vectors.items()}
    result = Play(federation, noisy, lost={"masked": federation.names[:3]}).run()
    np.testing.assert_array_equal(result.integers, sum(noisy[name] for name in result.survivors))
    exact = sum(v / max(1.0, np.linalg.norm(v)) for n, v in vectors.items() if n in result.survivors)
    error = result.total(privacy.fixed) - exact
    assert error.std() == pytest.approx(privacy.sigma * math.sqrt(7) * privacy.fixed.step, rel=0.03)
    # Of seven one may collude: six shares are as much noise as the settings promise, and more than the clip alone asks.
    assert privacy.sigma * math.sqrt(6) * privacy.fixed.step == pytest.approx(1.0, rel=0.01)


def test_its_cost_is_nearly_that_of_a_gaussian() -> None:
    accountants = []
    for event in (privacy_of(1000, 100, 70).event, None):
        accountant = Accountant(1e-5)
        from verbund.exchange.federated.privacy import Event

        accountant.spend(event or Event(noise=1.0), 5)
        accountants.append(accountant.spent())
    assert accountants[0].rdp == pytest.approx(accountants[1].rdp, rel=0.02)
    assert accountants[0].rdp >= accountants[1].rdp * (1 - 1e-9)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("bits", [8, 16])
def test_rounding_does_not_lengthen_what_is_accounted_for(rounding: str, bits: int) -> None:
    privacy = privacy_of(5000, 10, 7, rounding=rounding, bits=bits)
    exact = 1.0 / privacy.fixed.step
    assert exact <= privacy.sensitivity <= exact + math.sqrt(5000)
    for seed in range(5):
        vector = np.random.default_rng(seed).normal(size=5000)
        rounded = privacy.fixed.round(vector / np.linalg.norm(vector))
        if rounding == "nearest":
            assert np.linalg.norm(rounded) <= privacy.sensitivity
        privacy.integers(vector, "a", 0)


def test_a_vector_that_never_rounds_short_enough_is_not_sent() -> None:
    """Stochastic rounding that comes out longer than is accounted for is drawn anew."""
    privacy = privacy_of(400, 10, 7, rounding="stochastic", bits=4, noise=8.0)
    vector = np.full(400, 0.05)
    lengths = [float(np.linalg.norm(privacy.fixed.round(vector))) for _ in range(300)]
    assert max(lengths) > privacy.sensitivity * 0.9
    for _ in range(20):
        privacy.integers(vector, "a", 0)


def test_all_noise_together_fits_into_the_modulus() -> None:
    privacy = privacy_of(1000, 10, 7, noise=30.0, bits=12)
    federation = Federation(10, 1000, {"bits": 12}, headroom=privacy.headroom)
    most = federation.round().bits
    assert 2 ** (most - 1) > 10 * privacy.fixed.most + 12 * privacy.sigma * math.sqrt(10)
    zeros = {name: privacy.integers(np.zeros(1000), name, 0) for name in federation.names}
    result = Play(federation, zeros).run()
    assert isinstance(result, Sum)
    assert result.integers.std() == pytest.approx(privacy.sigma * math.sqrt(10), rel=0.1)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(InputError, match=r"beyond the range of 0\.5"):
        privacy_of(100, 10, 7, range=0.5)
    with pytest.raises(InputError, match="so coarse that"):
        privacy_of(100, 1000, 900, bits=3, noise=0.1)
    with pytest.raises(InputError, match="not finite"):
        privacy_of(3, 10, 7).integers(np.array([0.0, np.nan, 1.0]), "a", 0)
