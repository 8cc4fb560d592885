"""What privacy costs, against published figures and closed formulas."""

from __future__ import annotations

import math

import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from verbund.exchange.federated.privacy import Accountant, BudgetSpent, Event
from verbund.exchange.federated.privacy.accountant import noise_for


def gaussian_epsilon(noise: float, delta: float) -> float:
    """The exact ε of one Gaussian release (Balle, Wang, ICML 2018, theorem 8)."""

    def gap(epsilon: float) -> float:
        a, b = 1.0 / (2.0 * noise), epsilon * noise
        return float(norm.cdf(a - b) - math.exp(epsilon) * norm.cdf(-a - b) - delta)

    return float(brentq(gap, 0.0, 200.0))


def test_dp_sgd_costs_what_is_published() -> None:
    """Noise 1.1, rate 0.004, 15,000 steps (60 epochs of MNIST at batches of 240): 2.50 by Rényi, 2.31 by PRV."""
    accountant = Accountant(1e-5)
    accountant.spend(Event(noise=1.1, rate=0.004), 15_000)
    spent = accountant.spent()
    assert spent.rdp == pytest.approx(2.50, abs=0.02)
    assert spent.pld == pytest.approx(2.31, abs=0.02)
    assert spent.epsilon == spent.pld


@pytest.mark.parametrize("releases", [1, 16])
def test_gaussian_releases_cost_what_the_formula_says(releases: int) -> None:
    accountant = Accountant(1e-6)
    accountant.spend(Event(noise=4.0), releases)
    exact = gaussian_epsilon(4.0 / math.sqrt(releases), 1e-6)
    spent = accountant.spent()
    assert spent.pld == pytest.approx(exact, rel=1e-3)
    assert spent.rdp >= exact


def test_concentrated_privacy_costs_at_most_its_bound() -> None:
    """ρ + 2 √(ρ ln 1/δ) (Bun, Steinke, TCC 2016, proposition 1.3) is the looser bound."""
    accountant = Accountant(1e-5)
    accountant.spend(Event(rho=0.01), 10)
    spent = accountant.spent()
    bound = 0.1 + 2 * math.sqrt(0.1 * math.log(1e5))
    assert spent.pld is None
    assert 0.7 * bound < spent.epsilon <= bound


def test_the_budget_stops_before_it_is_exceeded() -> None:
    accountant = Accountant(1e-5, budget=3.0)
    event = Event(noise=2.0)
    done = 0
    while accountant.affords(event):
        accountant.spend(event)
        done += 1
        assert done < 100
    spent = accountant.spent().epsilon
    assert spent <= 3.0
    with pytest.raises(BudgetSpent, match=r"beyond the budget of 3; .* is spent"):
        accountant.spend(event)
    assert accountant.releases == done
    assert accountant.spent().epsilon == spent, "what was refused is not counted"
    beyond = Accountant(1e-5)
    beyond.spend(event, done + 1)
    assert beyond.spent().epsilon > 3.0, "one more would have been too much"


def test_noise_that_is_enough_is_enough_and_not_much_more() -> None:
    for rate in (None, 0.05):
        noise = noise_for(3.0, 1e-5, 200, rate)
        for factor, enough in ((1.0, True), (0.98, False)):
            accountant = Accountant(1e-5)
            accountant.spend(Event(noise=noise * factor, rate=rate), 200)
            assert (accountant.spent().rdp <= 3.0) == enough


def test_there_is_noise_enough_for_any_budget() -> None:
    assert 10 < noise_for(1e-6, 1e-5, 10) < 1e7


def test_how_many_releases_are_left() -> None:
    accountant = Accountant(1e-5, budget=3.0)
    event = Event(noise=2.0)
    left = accountant.left(event, 50)
    accountant.spend(event, left)
    assert 0 < left < 50
    assert accountant.left(event, 50) == 0
    assert Accountant(1e-5).left(event, 50) == 50


def test_what_was_spent_survives() -> None:
    accountant = Accountant(1e-5, budget=50.0)
    for event in (Event(noise=1.0), Event(noise=1.3, rate=0.1), Event(noise=1.0)):
        accountant.spend(event)
    again = Accountant(1e-5, budget=50.0)
    again.load(accountant.state())
    assert again.spent() == accountant.spent()
    assert again.releases == 3


def test_the_statement_claims_no_more_than_was_done() -> None:
    accountant = Accountant(1e-5, protects="whether one client takes part")
    assert accountant.statement() == "Nothing was released, so nothing is told of whether one client takes part."
    accountant.spend(Event(noise=2.0), 3)
    assert "no amplification by sampling is claimed" in accountant.statement()
    assert "for whether one client takes part, after 3 releases" in accountant.statement()
    accountant.spend(Event(noise=2.0, rate=0.1))
    assert "Poisson sampling at rate 0.1, which was done as such, some of them by none" in accountant.statement()
    assert accountant.summary()["epsilon"] == accountant.spent().epsilon


@pytest.mark.parametrize("wrong", [{}, {"noise": 0.0}, {"noise": 1.0, "rho": 1.0}, {"rho": 1.0, "rate": 0.5},
                                   {"noise": 1.0, "rate": 1.5}, {"noise": float("nan")}])  # fmt: skip
def test_events_that_make_no_sense(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="an event"):
        Event(**wrong)
