"""The schedule as a function of the step, against torch's schedulers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR, StepLR

from verbund.errors import InputError
from verbund.job import Schedule
from verbund.mesh import schedule


def described(name: str, **settings: Any) -> Schedule:
    return Schedule(name=name, **settings)  # type: ignore[arg-type]


def reference(decay: str, warmup: int, steps: int, total: int, final: float, every: int) -> list[float]:
    """The rates that torch's schedulers give a base rate of 1."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    length = total - warmup
    then: LRScheduler = {
        "linear": lambda: LinearLR(optimizer, 1.0, final, total_iters=length),
        "cosine": lambda: CosineAnnealingLR(optimizer, T_max=length, eta_min=final),
        "step": lambda: StepLR(optimizer, every, gamma=0.1),
        "constant": lambda: LinearLR(optimizer, 1.0, 1.0, total_iters=1),
    }[decay]()
    scheduler: LRScheduler = then
    if warmup:
        first = LinearLR(optimizer, 1 / (warmup + 1), 1.0, total_iters=warmup)
        scheduler = SequentialLR(optimizer, [first, then], milestones=[warmup])
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("decay", ["constant", "linear", "cosine", "step"])
@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize("final", [0.0, 0.25])
def test_the_factor_is_torchs(decay: str, warmup: int, final: float) -> None:
    settings = {"every": 5} if decay == "step" else {}
    ours = described(decay, warmup=warmup, final=final, **settings)
    # CosineAnnealingLR turns back up after its end, where ours stays.
    expected = reference(decay, warmup, 30, 30, final, 5)
    assert [schedule.factor(ours, step, 30) for step in range(30)] == pytest.approx(expected, abs=1e-12)


def test_beyond_its_end_the_last_rate_stays() -> None:
    for name in ("linear", "cosine"):
        ours = described(name, warmup=2, steps=10, final=0.1)
        assert schedule.factor(ours, 10, 1000) == pytest.approx(0.1)
        assert schedule.factor(ours, 999, 1000) == pytest.approx(0.1)
        assert schedule.factor(ours, 6, None) == pytest.approx(0.55)


@given(
    name=st.sampled_from(["constant", "linear", "cosine", "step"]),
    warmup=st.integers(0, 20),
    length=st.integers(1, 50),
    final=st.floats(0, 1),
    step=st.integers(0, 100),
)
def test_the_factor_is_a_share_that_no_step_starts_at_zero(
    name: str, warmup: int, length: int, final: float, step: int
) -> None:
    ours = described(name, warmup=warmup, final=final, every=3)
    here = schedule.factor(ours, step, warmup + length)
    assert 0.0 <= here <= 1.0
    if step <= warmup:
        assert here > 0.0
    else:
        assert here <= schedule.factor(ours, step - 1, warmup + length) + 1e-12


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_a_decay_needs_an_end(name: str) -> None:
    with pytest.raises(InputError, match=r"no known end.*train\.schedule\.steps"):
        schedule.factor(described(name, warmup=3), 0, None)
    with pytest.raises(InputError, match="at most 9 steps of warm-up"):
        schedule.factor(described(name, warmup=10), 0, 10)
    assert schedule.factor(described("constant"), 5, None) == 1.0
    assert schedule.factor(described("step", every=2), 5, None) == pytest.approx(0.01)


def test_groups_keep_their_own_base_rates() -> None:
    first, second = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [first], "lr": 0.5}, {"params": [second], "lr": 2.0}])
    for factor in (0.5, 0.1, 0.0, 1.0):
        schedule.apply(optimizer, factor)
        assert [group["lr"] for group in optimizer.param_groups] == [0.5 * factor, 2.0 * factor]
    schedule.apply(optimizer, 0.5)
    other = torch.optim.SGD([{"params": [first]}, {"params": [second]}], lr=7.0)
    other.load_state_dict(optimizer.state_dict())
    schedule.apply(other, 1.0)  # the base rates travel with the state
    assert [group["lr"] for group in other.param_groups] == [0.5, 2.0]
