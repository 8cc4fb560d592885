"""Local SGD and DiLoCo against a plain loop over torch modules, one per island, with torch's own outer optimiser."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from trained import parameters
from verbund.data.order import Order
from verbund.job import Exchange, Job
from verbund.run import Run

from .test_local_sgd import MODEL


def reference(job: Job, rows: int = 203) -> dict[str, torch.Tensor]:
    """The common weights after `job.train.steps` steps, every island in turn in this process, in float64."""
    settings, islands, steps = job.strategy.exchange, job.strategy.islands, job.train.steps
    assert steps is not None
    data = np.load(job.path("data.npz"))
    x, y = torch.from_numpy(data["x"]).double(), torch.from_numpy(data["y"])
    torch.manual_seed(job.seed)
    common = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 5)).double()
    models = [copy.deepcopy(common) for _ in range(islands)]
    inner = [torch.optim.AdamW(m.parameters(), lr=job.train.optimizer.lr) for m in models]
    outer = None
    if settings.name == "diloco":
        outer = torch.optim.SGD(
            common.parameters(), lr=settings.outer_lr, momentum=settings.outer_momentum, nesterov=True
        )
    order = Order(rows, job.train.global_batch, job.seed)
    every, fragments = settings.steps_between, settings.fragments
    last = [0] * fragments
    waiting: list[tuple[int, int, list[torch.Tensor]]] = []
    names = [[n for n, _ in common.named_parameters()][low:high] for low, high in RUNS[fragments]]

    def shares(ticket: int) -> list[np.ndarray[Any, Any]]:
        ids, size = order.positions(ticket), order.size(ticket)
        return [ids[size * i // islands : size * (i + 1) // islands] for i in range(islands)]

    def send(fragment: int, step: int, due: int) -> None:
        seen = [sum(len(shares(t)[i]) for t in range(last[fragment], step)) for i in range(islands)]
        last[fragment] = step
        means = []
        for name in names[fragment]:
            base = common.get_parameter(name).detach()
            own = [base - m.get_parameter(name).detach() for m in models]
            means.append(sum(n * o for n, o in zip(seen, own, strict=True)) / sum(seen))
        waiting.append((fragment, due, means))

    def arrive(step: float) -> None:
        while waiting and waiting[0][1] <= step:
            fragment, _, means = waiting.pop(0)
            for parameter in common.parameters():
                parameter.grad = None
            for name, mean in zip(names[fragment], means, strict=True):
                parameter = common.get_parameter(name)
                if outer is None:
                    parameter.data -= mean
                else:
                    parameter.grad = mean
            if outer is not None:
                outer.step()
            for model in models:
                for name in names[fragment]:
                    own = model.get_parameter(name).data
                    own.copy_(settings.kept * own + (1 - settings.kept) * common.get_parameter(name).data)

    for ticket in range(steps):
        for model, optimizer, ids in zip(models, inner, shares(ticket), strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[ids]), y[ids]).backward()
            optimizer.step()
        step = ticket + 1
        arrive(step)
        for fragment in range(fragments):
            if (step - every * (fragment + 1) // fragments) % every == 0:
                send(fragment, step, step + settings.delay)
        if not settings.delay:
            arrive(step)
    arrive(float("inf"))
    for fragment in range(fragments):
        if last[fragment] < steps:
            send(fragment, steps, steps)
            arrive(steps)
    return {name: p.detach() for name, p in common.named_parameters()}


# Which parameters belong to which fragment: weights of 192 and 80, biases of 16 and 5 elements.
RUNS = {1: [(0, 4)], 2: [(0, 1), (1, 4)]}


@pytest.mark.parametrize(
    "exchange",
    [
        {"name": "local_sgd", "every": 5},
        {"name": "diloco", "every": 5},
        {"name": "diloco", "every": 6, "fragments": 2},
        {"name": "diloco", "every": 6, "fragments": 2, "delay": 2},
        {"name": "local_sgd", "every": 4, "delay": 3, "mixing": 0.25},
    ],
    ids=lambda exchange: "-".join(str(value) for value in exchange.values()),
)
@pytest.mark.parametrize("islands", [2, 3])
def test_same_weights(exchange: dict[str, Any], islands: int, run_job: Callable[..., Run]) -> None:
    run = run_job(
        MODEL,
        {"train.steps": 23, "train.optimizer.lr": 0.01, "strategy.islands": islands, "strategy.exchange": exchange},
    )
    assert run.job.strategy.exchange == Exchange(**exchange)
    expected = reference(run.job)
    for name, value in parameters(run).items():
        torch.testing.assert_close(
            value.double(), expected[name], rtol=2e-5, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}"
        )
