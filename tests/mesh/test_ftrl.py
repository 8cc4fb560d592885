"""FTRL-proximal against its definition in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from verbund.job import Group, Optimizer
from verbund.mesh.ftrl import FTRL
from verbund.mesh.optimizer import build, check
from verbund.mesh.schedule import apply


class Paper:
    """Algorithm 1 of McMahan and others (2013), coordinate by coordinate.

    Where the first weights are not 0, z begins such that they follow from it; where the rate changes, σ is the
    difference of 1/η.
    """

    def __init__(self, weights: Tensor, alpha: float, beta: float, l1: float, l2: float) -> None:
        self.beta, self.l1, self.l2 = beta, l1, l2
        self.w = weights.double().clone()
        self.n = torch.zeros_like(self.w)
        self.inverse = torch.full_like(self.w, beta / alpha)
        self.z = -self.w * (self.inverse + l2) - self.w.sign() * l1

    def step(self, g: Tensor, alpha: float) -> None:
        g = g.double()
        self.n = self.n + g * g
        inverse = (self.beta + self.n.sqrt()) / alpha
        sigma = inverse - self.inverse
        self.z = self.z + g - sigma * self.w
        self.inverse = inverse
        solved = -(self.z - self.z.sign() * self.l1) / (inverse + self.l2)
        self.w = torch.where(self.z.abs() <= self.l1, torch.zeros_like(solved), solved)


@pytest.mark.parametrize("begin", [0.0, 1.0], ids=["zeros", "values"])
@pytest.mark.parametrize("changing", [False, True], ids=["constant", "schedule"])
@pytest.mark.parametrize(("beta", "l1", "l2"), [(1.0, 0.0, 0.0), (0.5, 0.0, 2.0), (1.0, 0.8, 0.0), (1.0, 1.5, 0.5)])
def test_200_steps_equal_the_paper(beta: float, l1: float, l2: float, changing: bool, begin: float) -> None:
    generator = torch.Generator().manual_seed(1)
    first = torch.randn(40, generator=generator) * begin
    ours = nn.Parameter(first.clone())
    optimizer = build([("w", ours)], Optimizer(name="ftrl", lr=0.3, beta=beta, l1=l1, l2=l2))
    rate = 0.5 if changing else 1.0
    paper = Paper(first, 0.3 * rate, beta, l1, l2)
    zeros = 0
    for step in range(200):
        rate = 1.0 / (2 + step % 9) if changing else 1.0
        g = (torch.randn(40, generator=generator) + torch.linspace(-0.2, 0.2, 40)).round(decimals=1)  # some are 0
        ours.grad = g
        apply(optimizer, rate)
        optimizer.step()
        paper.step(g, 0.3 * rate)
        zeros += int((ours == 0).sum())
        torch.testing.assert_close(ours.detach(), paper.w.float(), rtol=1e-5, atol=2e-6)
    assert (zeros > 25) == (l1 > 0)


def test_weights_without_gradients_stay_bit_for_bit() -> None:
    ours = nn.Parameter(torch.tensor([0.3, -0.7, 0.0, 1e-3]))
    first = ours.detach().clone()
    optimizer = build([("w", ours)], Optimizer(name="ftrl", lr=0.1, l1=0.1))
    for _ in range(20):
        ours.grad = torch.zeros(4)
        optimizer.step()
    assert torch.equal(ours.detach(), first)


def test_a_rate_of_0_changes_nothing() -> None:
    ours = nn.Parameter(torch.tensor([0.3, 0.0]))
    optimizer = build([("w", ours)], Optimizer(name="ftrl", lr=0.1, l1=0.1))
    apply(optimizer, 0.0)
    ours.grad = torch.ones(2)
    optimizer.step()
    assert torch.equal(ours.detach(), torch.tensor([0.3, 0.0]))
    assert all(value.isfinite().all() for value in optimizer.state[ours].values())


def test_it_goes_on_from_its_state() -> None:
    one = nn.Parameter(torch.randn(9, generator=torch.Generator().manual_seed(2)))
    settings = Optimizer(name="ftrl", lr=0.2, l1=0.5)
    first = build([("w", one)], settings)

    def step(parameter: nn.Parameter, optimizer: torch.optim.Optimizer, number: int) -> None:
        parameter.grad = torch.randn(9, generator=torch.Generator().manual_seed(number))
        optimizer.step()

    for number in range(5):
        step(one, first, number)
    other = nn.Parameter(one.detach().clone())
    second = build([("w", other)], settings)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for number in range(5, 10):
        step(one, first, number)
        step(other, second, number)
    assert torch.equal(one, other)


def test_it_is_an_optimiser_of_the_job() -> None:
    assert check(Optimizer(name="FTRL", lr=0.1, beta=2.0, l1=0.1, l2=0.1)) == []
    assert "Invalid l1".lower() in str(check(Optimizer(name="ftrl", l1=-1.0))[0]).lower()
    assert "beta" in str(check(Optimizer(name="ftrl", beta=0.0))[0])
    assert "`FTRL` has no argument `momentum`" in str(check(Optimizer(name="ftrl", momentum=0.9))[0])
    net = nn.Linear(2, 2)
    groups = [Group.model_validate({"match": "bias", "l1": 0.0})]
    optimizer = build(net.named_parameters(), Optimizer(name="ftrl", lr=0.1, l1=0.5, groups=groups))
    assert type(optimizer) is FTRL
    assert {name: group["l1"] for group in optimizer.param_groups for name in group["param_names"]} == {
        "weight": 0.5,
        "bias": 0.0,
    }
