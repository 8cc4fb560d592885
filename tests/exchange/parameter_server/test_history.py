"""Delay compensation: gradients at earlier values are corrected with the values they were computed with."""

from __future__ import annotations

import torch
from torch import Tensor

from exchange.parameter_server.holding import begun, push, send, spec
from verbund.exchange.parameter_server.history import History
from verbund.exchange.parameter_server.plan import Block, Plan, Rule
from verbund.exchange.parameter_server.push import Part

STRENGTH = 0.3


def gradient(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=generator)


def test_steps_are_those_of_the_paper() -> None:
    """DC-ASGD: w ← w − η·(g + λ·g·g·(w − w_bak))."""
    generator = torch.Generator().manual_seed(1)
    plan = Plan(
        (Block("a", (6,), "float32", (0,), (6,)),), spec("sgd", 0.1), Rule("asynchronous", compensation=STRENGTH)
    )
    first = gradient(generator, (6,))
    holdings = begun(plan, {"a": first})
    now, pulled = first.double(), {}
    for client in range(3):
        pulled[client] = (0, now.clone())
    for ticket in range(30):
        client = (ticket * ticket) % 3 if ticket % 4 else 2
        base, then = pulled[client]
        g = gradient(generator, (6,))
        send(holdings, push([Part(0, base, g)], ticket, client=client))
        now = now - 0.1 * (g + STRENGTH * g * g * (now - then))
        pulled[client] = (ticket + 1, now.clone())
    torch.testing.assert_close(holdings.read([0]).double(), now, rtol=1e-5, atol=1e-5)


def test_of_tables_too() -> None:
    generator = torch.Generator().manual_seed(1)
    block = Block("a", (8, 2), "float32", (0, 0), (8, 2), "rows")
    plan = Plan((block,), spec("sgd", 0.1), Rule("asynchronous", compensation=STRENGTH))
    first = gradient(generator, (8, 2))
    holdings = begun(plan, {"a": first})
    now = first.double()
    versions = [now]
    for ticket in range(40):
        client = ticket % 3
        base = max(0, ticket - 2 - (ticket % 2))
        rows = torch.randperm(8, generator=generator)[:3].sort().values
        g = gradient(generator, (3, 2))
        send(holdings, push([Part(0, base, g.view(-1), rows)], ticket, client=client))
        now = now.clone()
        now[rows] -= 0.1 * (g + STRENGTH * g * g * (now[rows] - versions[base][rows]))
        versions.append(now)
    torch.testing.assert_close(holdings.read_rows(0, torch.arange(8)).double(), now, rtol=1e-5, atol=1e-5)


def test_what_is_kept_is_bounded_and_what_is_not_is_not_compensated() -> None:
    history = History(5)
    values = torch.zeros(2)
    for version in range(5, 50):
        history.seen(0, 5 if version < 30 else version)  # one client stands still for long
        history.seen(1, version)
        assert len(history.tensors()) <= 4
        history.replaced(version, torch.full((2,), float(version)))
    assert history.at(4, values) is None
    assert history.at(5, values) is None
    assert history.at(50, values) is values
    found = history.at(49, values)
    assert found is not None
    assert found.tolist() == [49.0, 49.0]


def test_what_no_step_replaced_is_as_it_is() -> None:
    history, now = History(0), torch.ones(2)
    history.replaced(3, torch.zeros(2))
    for base in (0, 1, 3):
        found = history.at(base, now)
        assert found is not None
        assert found.tolist() == [0.0, 0.0]
    assert history.at(4, now) is now
