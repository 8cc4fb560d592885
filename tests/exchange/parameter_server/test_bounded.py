"""The bounded rule: each share is a step at once, and a block's version is the ticket before which it has all."""

from __future__ import annotations

import itertools
import threading
import time

import pytest
import torch
from torch import Tensor

from exchange.parameter_server.holding import begun, blocks_of, push, send, spec, whole
from exchange.parameter_server.serving import cluster
from verbund.errors import InputError, RunFailed
from verbund.exchange.parameter_server.holdings import Holdings
from verbund.exchange.parameter_server.plan import Block, Plan, Rule
from verbund.exchange.parameter_server.push import Part, Push

BOUNDED = Rule("bounded", staleness=2, shares=3)
TABLE = Block("t", (9, 2), "float32", (0, 0), (9, 2), "rows")
SUM = Block("s", (2,), "float32", (0,), (2,), "sum")
FRACTIONS = 0.5, 0.3, 0.2


def plan(optimizer: str = "sgd", **settings: object) -> Plan:
    return Plan((*blocks_of({"a": (4, 2)}, 8), SUM, TABLE), spec(optimizer, 0.1, **settings), BOUNDED)


def start(of: Plan) -> Holdings:
    return begun(of, {"a": torch.zeros(4, 2), "t": torch.zeros(9, 2), "s": torch.zeros(2)})


def share_of(ticket: int, share: int, seed: int = 0) -> Push:
    generator = torch.Generator().manual_seed(100 * seed + 10 * ticket + share)
    rows = torch.randperm(9, generator=generator)[: 1 + share].sort().values
    sizes: list[tuple[int, Tensor | None]] = [(8, None), (2, None), (2 * len(rows), rows)]
    parts = [Part(n, 0, torch.randn(size, generator=generator), r) for n, (size, r) in enumerate(sizes)]
    return push(parts, ticket, share, weight=1.0 + share, rate=FRACTIONS[share])


@pytest.mark.parametrize(("name", "settings"), [("sgd", {}), ("sgd", {"momentum": 0.5}), ("adam", {}), ("adagrad", {})])
def test_shares_are_steps_as_they_come(name: str, settings: dict[str, object]) -> None:
    """As torch takes them in float64, one after the other, with each one's mean and its part of the rate."""
    made = plan(name, **settings)
    holdings = start(made)
    theirs = torch.zeros(4, 2, dtype=torch.float64, requires_grad=True)
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adagrad": torch.optim.Adagrad}
    optimizer = kinds[name]([theirs], lr=0.1, **settings)  # type: ignore[arg-type]
    numbers = {block.name: number for number, block in enumerate(made.blocks)}
    total = torch.zeros(2, dtype=torch.float64)
    for ticket, share in [(0, 1), (1, 1), (0, 2), (0, 0), (2, 2), (1, 0), (1, 2), (2, 0), (2, 1)]:
        one = share_of(ticket, share)
        by_name = {made.blocks[part.block].name: part.values for part in one.parts if part.values is not None}
        send(holdings, one)
        theirs.grad = by_name["a"].double().view(4, 2) / one.weight
        optimizer.param_groups[0]["lr"] = 0.1 * FRACTIONS[share]
        optimizer.step()
        total += by_name["s"].double()
        torch.testing.assert_close(whole(holdings, "a").double(), theirs.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(holdings.read([numbers["s"]]).double(), total, rtol=1e-5, atol=1e-6)
    assert holdings.version(numbers["a"]) == 3


def test_plain_steps_sum_up_to_the_synchronous_ones_in_any_order() -> None:
    """With gradients that do not depend on the parameters SGD is a sum: it ends where whole tickets lead."""
    synchronous = begun(
        Plan(plan().blocks, spec("sgd", 0.1), Rule("synchronous", shares=3)),
        {"a": torch.zeros(4, 2), "t": torch.zeros(9, 2), "s": torch.zeros(2)},
    )
    every = [(ticket, share) for ticket in range(2) for share in range(3)]
    fractions = {share: (1.0 + share) / 6.0 for share in range(3)}  # the weights' part: what the synchronous rule takes
    for ticket, share in every:
        send(synchronous, Push(**{**vars(share_of(ticket, share)), "rate": 1.0}))
    for order in itertools.islice(itertools.permutations(every), 0, 720, 79):
        bounded = start(plan())
        for ticket, share in order:
            send(bounded, Push(**{**vars(share_of(ticket, share)), "rate": fractions[share]}))
        for name in ("a", "t", "s"):
            torch.testing.assert_close(whole(bounded, name), whole(synchronous, name), rtol=1e-5, atol=1e-6)


def test_versions_are_whole_tickets_and_repetitions_nothing() -> None:
    holdings = start(plan())
    told = [send(holdings, share_of(ticket, share))[0] for ticket, share in [(0, 0), (1, 0), (0, 0), (0, 2), (0, 1)]]
    assert [(outcome.state, outcome.version, outcome.staleness) for outcome in told] == [
        ("applied", 0, 0),
        ("applied", 0, 1),
        ("known", 0, None),
        ("applied", 0, 0),
        ("applied", 1, 0),
    ]
    assert holdings.missing(0) == [1, 2]
    with pytest.raises(InputError, match="is at ticket 1, which is too far behind"):
        holdings.check(push([Part(0, 0, torch.zeros(8))], 99))


def test_a_block_moves_in_the_middle_of_a_ticket() -> None:
    """With what it has of tickets that are not whole, and to the same bits after that."""
    here = start(plan("adam"))
    left = [share_of(ticket, share) for ticket in range(3) for share in (2, 0, 1)]
    for one in left[:4]:
        send(here, one)
    there = Holdings(here.plan)
    for number in range(len(here.plan.blocks)):
        there.put(here.image(number))
    for one in left[2:]:  # some a second time
        assert send(here, one) == send(there, one)
    for number in range(len(here.plan.blocks)):
        assert all(torch.equal(a, there.image(number).tensors[n]) for n, a in here.image(number).tensors.items())


def test_readers_see_what_is_there_and_wait_for_the_bound_alone() -> None:
    """A fast client is not held up by a slow one before the bound, and sees its own and others' shares until then."""
    made = Plan(tuple(blocks_of({"a": (2, 2)})), spec("sgd", 1.0), Rule("bounded", staleness=2, shares=2))
    with cluster(made, deadline=20.0) as servers:
        fast, slow = servers.client(0), servers.client(1)
        for number, block in enumerate(made.blocks):
            fast.begin(number, torch.zeros(block.count))
        into = {number: torch.zeros(block.count) for number, block in enumerate(made.blocks)}

        def step(client: object, ticket: int, share: int) -> None:
            versions = client.pull(into, max(ticket - 2, 0))  # type: ignore[attr-defined]
            parts = [
                Part(number, versions[number], torch.ones(block.count)) for number, block in enumerate(made.blocks)
            ]
            client.push(ticket, parts, weight=1.0, share=share, rate=0.5)  # type: ignore[attr-defined]

        for ticket in range(3):
            step(fast, ticket, 0)
            assert set(fast.pull(into).values()) == {0}
            assert all(torch.equal(values, torch.full_like(values, -0.5 * (ticket + 1))) for values in into.values())
        hurried = servers.client(0, deadline=1.5)
        with pytest.raises(RunFailed, match=r"version 1 was waited for: of ticket 0 these shares have not come: 1"):
            hurried.pull(into, 1)
        waiting = threading.Thread(target=step, args=(fast, 3, 0))
        waiting.start()
        step(slow, 0, 1)
        waiting.join(10.0)
        assert not waiting.is_alive()
        deadline = time.monotonic() + 10.0
        while set(fast.pull(into).values()) != {1}:
            assert time.monotonic() < deadline
        assert all(torch.equal(values, torch.full_like(values, -2.5)) for values in into.values())
