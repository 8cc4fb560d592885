"""The synchronous rules: shares are added up in their order, whenever they come."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from exchange.parameter_server.holding import SHAPES, begun, blocks_of, part_of, push, send, spec, whole
from verbund.errors import InputError
from verbund.exchange.parameter_server.holdings import Holdings
from verbund.exchange.parameter_server.plan import Block, Plan, Rule
from verbund.exchange.parameter_server.push import Part, Push


def gradients_of(generator: torch.Generator) -> dict[str, Tensor]:
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


@pytest.mark.parametrize(("name", "kind"), [("sgd", torch.optim.SGD), ("adam", torch.optim.Adam)])
def test_three_shares_in_any_order_equal_one_process(name: str, kind: Any) -> None:
    generator, order = torch.Generator().manual_seed(1), random.Random(1)
    values = gradients_of(generator)
    plan = Plan(tuple(blocks_of(SHAPES)), spec(name, 0.01), Rule("synchronous", shares=3))
    holdings, again = begun(plan, values), begun(plan, values)
    theirs = {key: nn.Parameter(value.clone()) for key, value in values.items()}
    optimizer = kind(theirs.values(), lr=0.01, foreach=False)
    for ticket in range(100):
        shares = [gradients_of(generator) for _ in range(3)]
        weights = [float(order.randint(0, 5)) for _ in range(3)]
        for key, parameter in theirs.items():
            total = sum((share[key].double() for share in shares), torch.zeros(()))
            parameter.grad = (total / sum(weights)).float() if sum(weights) else None
        optimizer.step()
        pushes = []
        for share in range(3):
            parts = [Part(n, ticket, part_of(b, shares[share][b.name])) for n, b in enumerate(plan.blocks)]
            pushes.append(push(parts, ticket, share, weight=weights[share]))
        order.shuffle(pushes)
        outcomes = [send(holdings, one) for one in pushes]
        assert [{outcome.state for outcome in some} for some in outcomes] == [{"waiting"}, {"waiting"}, {"applied"}]
        for one in reversed(pushes):  # other shares first, each twice
            send(again, one)
            assert send(again, one)[0].state == "known"
    for key, parameter in theirs.items():
        torch.testing.assert_close(whole(holdings, key), parameter.detach(), rtol=1e-6, atol=1e-6)
        assert torch.equal(whole(holdings, key), whole(again, key))


PLAN = Plan(
    (
        *blocks_of({"a": (4, 2)}),
        Block("t", (9, 2), "float32", (0, 0), (9, 2), "rows"),
        Block("s", (2,), "float32", (0,), (2,), "sum"),
    ),
    spec("sgd", momentum=0.5),
    Rule("synchronous", staleness=2, shares=3),
)


def start() -> Holdings:
    return begun(PLAN, {"a": torch.zeros(4, 2), "t": torch.zeros(9, 2), "s": torch.zeros(2)})


def pushes(tickets: int, shares: int) -> list[Push]:
    generator = torch.Generator().manual_seed(5)
    found = []
    for ticket in range(tickets):
        for share in range(shares):
            rows = torch.randperm(9, generator=generator)[: 1 + share].sort().values
            sizes = [(4, None), (4, None), (2 * len(rows), rows), (2, None)]
            parts = [Part(n, 0, torch.randn(size, generator=generator), r) for n, (size, r) in enumerate(sizes)]
            found.append(push(parts, ticket, share, weight=1.0 + share))
    return found


@given(st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_the_order_in_which_shares_come_changes_no_bit(order: random.Random) -> None:
    """As long as no share is further ahead than the bound, with repetitions and parts of pushes."""
    straight, mixed = start(), start()
    every = pushes(5, 3)
    for one in every:
        send(straight, one)
    left = list(every)
    while left:
        low = min(one.ticket for one in left)
        one = order.choice([one for one in left if one.ticket <= low + 2])
        left.remove(one)
        numbers = order.sample(range(4), 4)
        at = order.randint(0, 4)
        for some in (numbers[:at], numbers[at:], order.sample(numbers, 2)):
            send(mixed, Push(**{**vars(one), "parts": [one.parts[number] for number in some]}))
    for number in range(4):
        assert mixed.version(number) == 5
        a, b = straight.image(number), mixed.image(number)
        assert a.fields == b.fields
        assert all(torch.equal(a.tensors[name], b.tensors[name]) for name in a.tensors | b.tensors)


def test_a_reader_within_the_bound_sees_what_it_should() -> None:
    holdings = start()
    every = pushes(4, 3)
    assert send(holdings, every[3 * 2])[0].state == "waiting"  # two tickets ahead
    for one in every[:3]:
        last = send(holdings, one)[0]
    assert (last.state, last.version, last.staleness) == ("applied", 1, 0)
    with pytest.raises(InputError, match="is at ticket 1, which is too far behind"):
        holdings.check(push([Part(0, 0, torch.zeros(4))], 99))


def test_several_tickets_may_be_due_at_once() -> None:
    holdings = start()
    every = pushes(3, 3)
    for one in (every[0], every[1], *every[3:]):
        assert {outcome.state for outcome in send(holdings, one)} == {"waiting"}
    outcomes = send(holdings, every[2])
    assert [(outcome.state, outcome.version, outcome.staleness) for outcome in outcomes] == [("applied", 3, 0)] * 4


def test_with_backup_a_ticket_goes_on_without_the_last() -> None:
    plan = Plan(tuple(blocks_of({"a": (2, 2)})), spec("sgd", 1.0), Rule("synchronous", shares=3, backup=1))
    holdings = begun(plan, {"a": torch.zeros(2, 2)})

    def one(ticket: int, share: int, value: float, low: int = 0) -> Any:
        return send(holdings, push([Part(0, ticket, torch.full((4,), value))], ticket, share, weight=1.0, low=low))[0]

    assert one(0, 2, 4.0).state == "waiting"
    assert one(0, 0, 2.0).state == "applied"
    assert holdings.read([0]).tolist() == [-3.0] * 4
    late = one(0, 1, 100.0)
    assert (late.state, late.version, late.staleness) == ("late", 1, None)
    assert one(0, 1, 100.0).state == "known"
    assert one(1, 1, 1.0).state == "waiting"
    assert one(1, 2, 1.0).state == "applied"
    assert holdings.read([0]).tolist() == [-4.0] * 4
    assert one(2, 0, 1.0, low=2).state == "waiting"
    assert one(1, 0, 1.0).state == "known"  # as nothing is remembered of it
    assert holdings.image(0).fields["ledger"] == {"low": 2, "later": [[2, 0]]}


def test_what_is_not_taken_is_not_forgotten_whatever_a_client_says() -> None:
    holdings = start()
    one, *_ = pushes(1, 3)
    send(holdings, Push(**{**vars(one), "low": 7}))
    assert {outcome.state for outcome in send(holdings, pushes(1, 3)[1])} == {"waiting"}


def test_weights_and_unused_shares() -> None:
    plan = Plan(tuple(blocks_of({"a": (2, 2)})), spec("sgd", 1.0), Rule("synchronous", shares=2))
    holdings = begun(plan, {"a": torch.zeros(2, 2)})
    send(holdings, push([Part(0, 0, torch.ones(4))], 0, 1, weight=3.0, scale=8.0))
    send(holdings, push([Part(0, 0, None)], 0, 0, weight=1.0))
    assert holdings.read([0]).tolist() == [-2.0] * 4  # the share that did not use it has weight too
    for share in (0, 1):
        send(holdings, push([Part(0, 1, None)], 1, share, weight=1.0))
    for share in (0, 1):
        send(holdings, push([Part(0, 1, torch.ones(4))], 2, share, weight=0.0))
    assert holdings.version(0) == 3
    assert holdings.read([0]).tolist() == [-2.0] * 4


def test_a_run_goes_on_at_its_ticket() -> None:
    plan = Plan(tuple(blocks_of({"a": (2, 2)})), spec("sgd", 1.0), Rule("synchronous", shares=1))
    holdings = Holdings(plan)
    holdings.create(0, torch.zeros(2, 2), version=7)
    assert send(holdings, push([Part(0, 7, torch.ones(4))], 6))[0].state == "known"
    assert send(holdings, push([Part(0, 7, torch.ones(4))], 7))[0].state == "applied"
    assert holdings.version(0) == 8
