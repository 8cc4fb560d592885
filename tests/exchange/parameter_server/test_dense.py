"""Dense blocks against torch's optimisers on whole tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from exchange.parameter_server.holding import (
    ASYNCHRONOUS,
    SHAPES,
    begun,
    blocks_of,
    part_of,
    push,
    send,
    spec,
    whole,
)
from verbund.errors import InputError
from verbund.exchange.parameter_server.holdings import Holdings
from verbund.exchange.parameter_server.plan import Block, Plan, Rule
from verbund.exchange.parameter_server.push import Part
from verbund.job import Group, Optimizer
from verbund.mesh.ftrl import FTRL
from verbund.mesh.schedule import apply

OPTIMIZERS: list[tuple[str, Any, dict[str, Any]]] = [
    ("sgd", torch.optim.SGD, {}),
    ("sgd", torch.optim.SGD, {"momentum": 0.9}),
    ("sgd", torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("sgd", torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    ("adagrad", torch.optim.Adagrad, {"initial_accumulator_value": 0.1}),
    ("adam", torch.optim.Adam, {}),
    ("adam", torch.optim.Adam, {"amsgrad": True}),
    ("adamw", torch.optim.AdamW, {"weight_decay": 0.05}),
    ("rmsprop", torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
    ("nadam", torch.optim.NAdam, {}),
    ("radam", torch.optim.RAdam, {}),
    ("adamax", torch.optim.Adamax, {}),
    ("adadelta", torch.optim.Adadelta, {}),
    ("rprop", torch.optim.Rprop, {}),
    ("asgd", torch.optim.ASGD, {}),
    ("ftrl", FTRL, {"l1": 0.5, "l2": 0.1}),
]


def values_of(generator: torch.Generator) -> dict[str, Tensor]:
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("lists", [False, True], ids=["default", "foreach"])
@pytest.mark.parametrize(("name", "kind", "arguments"), OPTIMIZERS)
def test_100_steps_equal_torchs(name: str, kind: Any, arguments: dict[str, Any], lists: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    values = values_of(generator)
    plain = {} if kind is FTRL else {"foreach": False}
    chosen = {"foreach": True} if lists and plain else {}
    plan = Plan(tuple(blocks_of(SHAPES)), spec(name, 0.02, **arguments, **chosen), ASYNCHRONOUS)
    holdings = begun(plan, values)
    theirs = {key: nn.Parameter(value.clone()) for key, value in values.items()}
    optimizer = kind(theirs.values(), lr=0.02, **plain, **arguments)
    for ticket in range(100):
        rate, weight, scale = 1.0 / (1 + ticket % 3), 8.0, 0.5
        sums = values_of(generator)
        gradients = {key: value * (scale / weight) for key, value in sums.items()}
        apply(optimizer, rate)
        for key, parameter in theirs.items():
            unused = key == "b.weight" and ticket % 7 == 0  # not even in the first step
            parameter.grad = None if unused else gradients[key]
        optimizer.step()
        parts = [
            Part(number, ticket, None if theirs[block.name].grad is None else part_of(block, sums[block.name]))
            for number, block in enumerate(plan.blocks)
        ]
        outcomes = send(holdings, push(parts, ticket, scale=scale, weight=weight, rate=rate))
        assert all(outcome.state == "applied" and outcome.version == ticket + 1 for outcome in outcomes)
    limit = 1e-5 if name == "asgd" else 1e-6  # torch's own two implementations of it are that far apart
    for key, parameter in theirs.items():
        torch.testing.assert_close(whole(holdings, key), parameter.detach(), rtol=limit, atol=limit)


def test_groups_go_by_the_names_of_tensors_also_where_a_server_has_none_of_one() -> None:
    settings = Optimizer(
        name="adamw",
        lr=0.01,
        weight_decay=0.1,
        groups=[
            Group.model_validate({"match": "*.bias", "weight_decay": 0.0}),
            Group.model_validate({"match": "b.*", "scale_lr": 0.1}),
        ],
    )
    generator = torch.Generator().manual_seed(2)
    values = values_of(generator)
    plan = Plan(tuple(blocks_of(SHAPES)), settings, ASYNCHRONOUS)
    numbers = [number for number, block in enumerate(plan.blocks) if block.name != "b.weight"]
    first, second = begun(plan, values), begun(plan, values)
    for number in range(len(plan.blocks)):
        (second if number in numbers else first).drop(number)
    theirs = {key: nn.Parameter(value.clone()) for key, value in values.items()}
    optimizer = torch.optim.AdamW(
        [
            {"params": [theirs["a.weight"]], "weight_decay": 0.1, "lr": 0.01},
            {"params": [theirs["a.bias"]], "weight_decay": 0.0, "lr": 0.01},
            {"params": [theirs["b.weight"]], "weight_decay": 0.1, "lr": 0.001},
        ]
    )
    for ticket in range(100):
        gradients = values_of(generator)
        for key, parameter in theirs.items():
            parameter.grad = gradients[key]
        optimizer.step()
        for holdings in (first, second):
            parts = [
                Part(number, ticket, part_of(block, gradients[block.name]))
                for number, block in enumerate(plan.blocks)
                if number in holdings
            ]
            send(holdings, push(parts, ticket))
    for key, parameter in theirs.items():
        holder = second if key == "b.weight" else first
        torch.testing.assert_close(whole_of(holder, key), parameter.detach(), rtol=1e-6, atol=1e-6)


def whole_of(holdings: Holdings, name: str) -> Tensor:
    numbers = [number for number, block in enumerate(holdings.plan.blocks) if block.name == name]
    return holdings.read(numbers).view(SHAPES[name])


def test_a_block_may_come_and_go_while_the_optimiser_lives() -> None:
    generator = torch.Generator().manual_seed(3)
    values = values_of(generator)
    plan = Plan(tuple(blocks_of(SHAPES)), spec("sgd", momentum=0.9), ASYNCHRONOUS)
    steady, moved, other = begun(plan, values), begun(plan, values), Holdings(plan)
    for ticket in range(12):
        gradients = values_of(generator)
        here, there = (moved, other) if ticket % 2 else (other, moved)
        for number in (1, 3):
            if number in there:
                image = there.image(number)
                there.drop(number)
                here.put(image)
        parts = [Part(n, ticket, part_of(b, gradients[b.name])) for n, b in enumerate(plan.blocks)]
        send(steady, push(parts, ticket))
        for holdings in (moved, other):
            send(holdings, push([part for part in parts if part.block in holdings], ticket))
    for number in range(len(plan.blocks)):
        holder = moved if number in moved else other
        assert torch.equal(holder.read([number]), steady.read([number]))
        assert holder.version(number) == 12


def test_a_moved_block_and_a_new_one_step_together() -> None:
    """Fused SGD cannot begin the moments of one parameter where another has its own."""
    plan = Plan(tuple(blocks_of({"a": (4, 2)})), spec("sgd", momentum=0.9), ASYNCHRONOUS)
    holdings = begun(plan, {"a": torch.zeros(4, 2)})
    send(holdings, push([Part(0, 0, torch.ones(4))], 0))
    send(holdings, push([Part(0, 1, torch.ones(4)), Part(1, 0, torch.ones(4))], 1))
    torch.testing.assert_close(holdings.read([0]), torch.full((4,), -0.1 - 0.19))
    torch.testing.assert_close(holdings.read([1]), torch.full((4,), -0.1))


def test_sums_are_added_to_and_a_scalar_is_a_block() -> None:
    blocks = (
        Block("mean", (3,), "float32", (0,), (3,), "sum"),
        Block("count", (), "int64", (), (), "sum"),
        Block("scale", (), "float32", (), ()),
    )
    plan = Plan(blocks, spec("adam"), ASYNCHRONOUS)
    holdings = begun(plan, {"mean": torch.ones(3), "count": torch.tensor(3), "scale": torch.tensor(2.0)})
    parts = [Part(0, 0, torch.tensor([1.0, 2.0, 3.0])), Part(1, 0, torch.tensor([2])), Part(2, 0, torch.ones(1))]
    send(holdings, push(parts, 0, scale=2.0, weight=5.0))
    assert holdings.read([0]).tolist() == [3.0, 5.0, 7.0]
    assert holdings.read([1]).tolist() == [7]
    torch.testing.assert_close(holdings.read([2]), torch.tensor([1.9]))
    with pytest.raises(InputError, match="whole numbers"):
        holdings.check(push(parts, 1, scale=0.5))


def test_a_rule_may_ask_for_rates_by_staleness() -> None:
    plan = Plan(tuple(blocks_of({"a": (2, 2)})), spec("sgd", 1.0), Rule("asynchronous", staleness_aware=True))
    holdings = begun(plan, {"a": torch.zeros(2, 2)})
    changes = []
    for ticket, base in enumerate((0, 0, 0, 0, 4)):
        before = holdings.read([0])
        outcome = send(holdings, push([Part(0, base, torch.ones(4))], ticket))[0]
        changes.append(float((before - holdings.read([0]))[0]))
        assert outcome.staleness == ticket - base
    assert changes == pytest.approx([1.0, 1.0, 1 / 2, 1 / 3, 1.0])


def test_blocks_of_one_push_have_their_own_staleness() -> None:
    plan = Plan(tuple(blocks_of({"a": (4, 2)})), spec("sgd", 1.0), Rule("asynchronous", staleness_aware=True))
    holdings = begun(plan, {"a": torch.zeros(4, 2)})
    for ticket in range(4):
        send(holdings, push([Part(0, ticket, torch.zeros(4))], ticket))
    outcomes = send(holdings, push([Part(0, 0, torch.ones(4)), Part(1, 0, torch.ones(4))], 4))
    assert [outcome.staleness for outcome in outcomes] == [4, 0]
    assert holdings.read([0, 1]).tolist() == [-0.25] * 4 + [-1.0] * 4


@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_optimisers_that_need_whole_tensors_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=f"`{name}` needs whole parameters"):
        Holdings(Plan(tuple(blocks_of(SHAPES)), spec(name), ASYNCHRONOUS))


def test_nothing_to_learn_raises_the_version_alone() -> None:
    plan = Plan(tuple(blocks_of({"a": (2, 2)})), spec("adam"), ASYNCHRONOUS)
    holdings = begun(plan, {"a": torch.ones(2, 2)})
    send(holdings, push([Part(0, 0, None)], 0))
    send(holdings, push([Part(0, 0, torch.ones(4))], 1, weight=0.0))
    assert holdings.version(0) == 2
    assert torch.equal(holdings.read([0]), torch.ones(4))
    assert send(holdings, push([Part(0, 0, torch.ones(4))], 1))[0].state == "known"
    assert holdings.version(0) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["sgd", "adam", "adagrad", "rmsprop", "ftrl"])
def test_other_dtypes(name: str, dtype: torch.dtype) -> None:
    text = str(dtype).removeprefix("torch.")
    table = Block("t", (6, 2), text, (0, 0), (6, 2), "rows", (1, 0.5))
    plan = Plan((*blocks_of({"a": (4, 2)}, dtype=text), table), spec(name, 0.05), Rule("synchronous", shares=2))
    holdings = begun(plan, {"a": torch.ones(4, 2, dtype=dtype)})
    rows = torch.tensor([1, 4])
    for ticket in range(3):
        for share in range(2):
            parts = [
                Part(number, ticket, torch.ones(4, dtype=dtype), rows if number == 2 else None) for number in range(3)
            ]
            send(holdings, push(parts, ticket, share))
    other = Holdings(plan)
    for number in range(3):
        other.put(holdings.image(number))
    assert holdings.read([0, 1]).dtype == other.read_rows(2, rows).dtype == dtype
    assert bool((holdings.read([0, 1]) < 1).all())
    assert torch.equal(whole(holdings, "t"), whole(other, "t"))


@pytest.mark.parametrize("settings", [{}, {"foreach": True}, {"foreach": False}], ids=["default", "lists", "plain"])
@pytest.mark.parametrize(("name", "kind", "arguments"), OPTIMIZERS)
def test_no_optimiser_changes_a_push(name: str, kind: Any, arguments: dict[str, Any], settings: dict[str, Any]) -> None:
    """Also where its gradients are those to step with: other servers may be reading them."""
    if kind is FTRL:
        settings = {}
    plan = Plan(tuple(blocks_of({"a": (4, 2)})), spec(name, **{**arguments, **settings}), ASYNCHRONOUS)
    holdings = begun(plan, {"a": torch.ones(4, 2)})
    for ticket, sign in enumerate((1.0, 1.0, -1.0, 1.0)):  # `send` compares
        parts = [Part(number, ticket, torch.full((4,), sign)) for number in range(2)]
        send(holdings, push(parts, ticket))
