"""Clipping is exact, central and local noise is as large as is accounted for, and the norm follows its quantile."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verbund.exchange.federated.privacy import CentralPrivacy, Event, LocalPrivacy, clipped
from verbund.exchange.federated.privacy.clipping import split_noise
from verbund.job import Privacy


def length(tensors: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors.values()))


@settings(deadline=None)
@given(st.integers(0, 10_000), st.floats(1e-6, 1e6), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_a_clipped_update_is_never_longer(seed: int, bound: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    update = {
        name: torch.randn(*shape, generator=generator).to(dtype) * bound for name, shape in (("a", (3, 5)), ("b", (7,)))
    }
    short, inside = clipped(update, bound)
    if length(update) <= bound:
        assert inside
        assert all(torch.equal(short[name], update[name]) for name in update)
        return
    assert not inside
    assert length(short) <= bound
    assert length(short) >= bound * (1 - 0.03)
    for name in update:
        torch.testing.assert_close(
            short[name].double(), update[name].double() * (bound / length(update)), rtol=0.03, atol=0
        )


def test_what_is_not_finite_counts_as_nothing() -> None:
    for bad in (float("nan"), float("inf")):
        short, inside = clipped({"a": torch.tensor([1.0, bad])}, 1.0)
        assert not inside
        assert short["a"].tolist() == [0.0, 0.0]


def test_central_noise() -> None:
    privacy = CentralPrivacy(Privacy(kind="central", noise=0.8, clip=2.0), clients=10)
    total = {"w": torch.full((200, 500), 30.0), "b": torch.zeros(1000)}
    mean = privacy.release(total, 10, 10, 0)
    assert float(mean["w"].mean()) == pytest.approx(3.0, abs=0.003)
    assert float(mean["w"].std()) == pytest.approx(0.8 * 2.0 / 10, rel=0.02)
    assert privacy.event == Event(noise=0.8)
    again = privacy.release(total, 10, 10, 0)
    assert not torch.equal(mean["w"], again["w"]), "without a seed no two releases are alike"


def test_central_privacy_counts_on_sampling_only_if_it_was_poissons() -> None:
    with pytest.raises(ValueError, match="Poisson"):
        CentralPrivacy(Privacy(kind="central"), 10, rate=0.1)
    with pytest.raises(ValueError, match="Poisson"):
        CentralPrivacy(Privacy(kind="central", sampling="poisson"), 10)
    assert CentralPrivacy(Privacy(kind="central", sampling="poisson"), 10, rate=0.1).event == Event(noise=1.0, rate=0.1)


def test_noise_on_sum_and_count_together_costs_what_is_said() -> None:
    """Both are one Gaussian release of a vector: the count's part, scaled, has the sensitivity that is left."""
    z, b = 0.9, 5.0
    of_sum = split_noise(z, b)
    assert of_sum > z
    assert (1 / of_sum) ** 2 + (0.5 / b) ** 2 == pytest.approx((1 / z) ** 2)
    with pytest.raises(ValueError, match="leaves nothing"):
        split_noise(2.0, 1.0)


@pytest.mark.parametrize("first", [0.05, 40.0])
def test_the_norm_follows_the_quantile(first: float) -> None:
    """Of norms that are spread evenly over 0 … 4 six tenths lie below 2.4."""
    settings = Privacy(kind="central", noise=0.5, clip=first, adaptive=True, quantile=0.6)
    privacy = CentralPrivacy(settings, clients=100, seed=3)
    norms = np.linspace(0.0, 4.0, 100)
    assert privacy.multiplier == pytest.approx((0.5**-2 - 0.1**2) ** -0.5)
    for round_ in range(120):
        updates = [privacy.clipped({"w": torch.tensor([n])}) for n in norms]
        total = {"w": torch.stack([u["w"] for u, _ in updates]).sum(0)}
        privacy.release(total, sum(inside for _, inside in updates), 100, round_)
    assert privacy.clip == pytest.approx(2.4, rel=0.2)
    again = CentralPrivacy(settings, clients=100, seed=3)
    again.load(privacy.state())
    assert again.clip == privacy.clip


def test_local_noise() -> None:
    privacy = LocalPrivacy(Privacy(kind="local", noise=3.0, clip=0.5))
    sent = privacy.protected({"w": torch.full((300, 300), 9.0)}, 0)
    assert float(sent["w"].std()) == pytest.approx(1.5, rel=0.02)
    assert float(sent["w"].mean()) == pytest.approx(0.5 / 300, abs=0.02)
    assert privacy.event == Event(noise=1.5), "two updates are up to twice the norm apart"
