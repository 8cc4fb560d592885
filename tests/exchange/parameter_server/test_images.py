"""Two machines that take the same pushes are equal bit for bit, also if one of them is replaced from images."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exchange.parameter_server.holding import begun, blocks_of, push, spec
from verbund.exchange.parameter_server.holdings import Holdings, Image
from verbund.exchange.parameter_server.plan import Block, Plan, Rule
from verbund.exchange.parameter_server.push import Part, Push

BLOCKS = (
    *blocks_of({"a": (4, 2)}),
    Block("born", (9, 2), "float32", (3, 0), (6, 2), "rows", (3, 0.1)),
    Block("given", (5, 2), "float32", (0, 0), (5, 2), "rows"),
    Block("sum", (2,), "float32", (0,), (2,), "sum"),
)
RULES = {
    "synchronous": Rule("synchronous", shares=3),
    "bounded": Rule("bounded", staleness=1, shares=3),
    "backup": Rule("synchronous", shares=3, backup=1),
    "asynchronous": Rule("asynchronous"),
    "compensated": Rule("asynchronous", staleness_aware=True, compensation=0.5),
}
OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("sgd", {}),
    ("sgd", {"momentum": 0.9}),
    ("adagrad", {"initial_accumulator_value": 0.1}),
    ("adam", {}),
    ("rprop", {}),
]


def start(rule: Rule, name: str, arguments: dict[str, Any]) -> Holdings:
    values = {"a": torch.ones(4, 2), "given": torch.ones(5, 2), "sum": torch.zeros(2)}
    return begun(Plan(BLOCKS, spec(name, 0.05, **arguments), rule), values)


def draw(order: random.Random, holdings: Holdings, shared: bool) -> Push:
    """Any push that may be sent: some blocks, some of them unused, rows or none, old bases, repetitions."""
    generator = torch.Generator().manual_seed(order.randint(0, 1 << 30))
    parts = []
    for number in order.sample(range(len(BLOCKS)), order.randint(1, len(BLOCKS))):
        block, base = BLOCKS[number], max(0, holdings.version(number) - order.randint(0, 3))
        if order.random() < 0.15:
            parts.append(Part(number, base, None))
            continue
        rows = None
        if block.kind == "rows":
            rows = torch.randperm(block.length[0], generator=generator)[: order.randint(0, 3)].sort().values
            rows += block.offset[0]
        size = block.count if rows is None else len(rows) * block.width
        parts.append(Part(number, base, torch.randn(size, generator=generator), rows))
    ticket = order.randint(0, 5) if shared else order.randint(0, 30)
    share = order.randint(0, 2) if shared else 0
    return push(parts, ticket, share, client=order.randint(0, 2), weight=order.choice([0.0, 1.0, 2.0]), low=0)


def assert_equal(one: Holdings, other: Holdings) -> None:
    for number in range(len(BLOCKS)):
        a, b = one.image(number), other.image(number, copy=False)
        assert a.fields == b.fields
        assert a.tensors.keys() == b.tensors.keys()
        for name, tensor in a.tensors.items():
            assert tensor.dtype == b.tensors[name].dtype
            assert torch.equal(tensor, b.tensors[name]), (number, name)


def sent(image: Image) -> Image:
    """An image that has gone over the wire: flat arrays and JSON."""
    tensors = {name: tensor.reshape(tensor.shape).clone() for name, tensor in image.tensors.items()}
    return Image(image.block, json.loads(json.dumps(image.fields)), tensors)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("name", "arguments"), OPTIMIZERS)
@given(st.randoms(use_true_random=False))
@settings(max_examples=12, deadline=None)
def test_a_machine_that_is_replaced_in_the_middle_is_the_same(
    rule: str, name: str, arguments: dict[str, Any], order: random.Random
) -> None:
    steady, other = start(RULES[rule], name, arguments), start(RULES[rule], name, arguments)
    for _ in range(14):
        if order.random() < 0.3:
            number = order.randrange(len(BLOCKS))
            other.put(sent(steady.image(number, copy=False)))
        if order.random() < 0.15:
            fresh = Holdings(other.plan)
            for number in range(len(BLOCKS)):
                fresh.put(sent(other.image(number)))
            other = fresh
        one = draw(order, steady, RULES[rule].shared)
        steady.check(one)
        assert steady.apply(one) == other.apply(one)
        if order.random() < 0.5:
            other.read([0, 1])
            other.read_rows(2, torch.tensor([3, 8, 3]))
    assert_equal(steady, other)


def test_a_copy_is_a_copy() -> None:
    holdings = start(RULES["asynchronous"], "adam", {})
    one = push([Part(0, 0, torch.ones(4)), Part(2, 0, torch.ones(2), torch.tensor([4]))])
    holdings.apply(one)
    before = [holdings.image(number) for number in range(len(BLOCKS))]
    kept = [{name: tensor.clone() for name, tensor in image.tensors.items()} for image in before]
    holdings.apply(Push(**{**vars(one), "ticket": 1}))
    for image, tensors in zip(before, kept, strict=True):
        assert all(torch.equal(image.tensors[name], tensors[name]) for name in tensors)
