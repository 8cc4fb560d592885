"""Small holdings for tests, and pushes to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from verbund.checkpoint.box import Box
from verbund.exchange.parameter_server.holdings import Holdings
from verbund.exchange.parameter_server.plan import Block, Plan, Rule, cut
from verbund.exchange.parameter_server.push import Outcome, Part, Push
from verbund.job import Optimizer

ASYNCHRONOUS = Rule("asynchronous")
SHAPES = {"a.weight": (7, 5), "a.bias": (5,), "b.weight": (3, 4)}


def spec(name: str, lr: float = 0.1, **settings: Any) -> Optimizer:
    return Optimizer(name=name, lr=lr, **settings)


def blocks_of(shapes: dict[str, tuple[int, ...]], rows: int = 2, dtype: str = "float32") -> list[Block]:
    """Dense blocks of so many rows."""
    found = []
    for name, shape in shapes.items():
        whole = Box((0,) * len(shape), shape)
        width = whole.volume // max(shape[0], 1) if shape else 1
        found += cut(name, shape, dtype, whole, rows * width, 1)
    return found


def part_of(block: Block, tensor: Tensor) -> Tensor:
    """What of a whole tensor lies in a block, flat."""
    return tensor[block.box.within(Box.whole(block.shape))].reshape(-1) if block.shape else tensor.reshape(-1)


def begun(plan: Plan, values: dict[str, Tensor]) -> Holdings:
    """Holdings of all blocks of a plan."""
    holdings = Holdings(plan)
    for number, block in enumerate(plan.blocks):
        holdings.create(number, part_of(block, values[block.name]) if block.name in values else None)
    return holdings


def push(
    parts: Sequence[Part],
    ticket: int = 0,
    share: int = 0,
    *,
    client: int = 0,
    scale: float = 1.0,
    weight: float = 1.0,
    rate: float = 1.0,
    low: int = 0,
) -> Push:
    return Push(client, 0, ticket, share, scale, weight, rate, low, parts)


def send(holdings: Holdings, pushed: Push) -> list[Outcome]:
    """What a server does with a push."""
    kept = [None if part.values is None else part.values.clone() for part in pushed.parts]
    holdings.check(pushed)
    outcomes = holdings.apply(pushed)
    for before, part in zip(kept, pushed.parts, strict=True):
        assert before is None or (part.values is not None and torch.equal(before, part.values)), "a push was changed"
    return outcomes


def whole(holdings: Holdings, name: str) -> Tensor:
    """A tensor put together from its dense blocks or the rows of its tables."""
    blocks = [(number, block) for number, block in enumerate(holdings.plan.blocks) if block.name == name]
    tensor = torch.zeros(blocks[0][1].shape, dtype=getattr(torch, blocks[0][1].dtype))
    for number, block in blocks:
        if block.kind == "rows":
            values = holdings.read_rows(number, torch.arange(block.offset[0], block.offset[0] + block.length[0]))
        else:
            values = holdings.read([number])
        if block.shape:
            tensor[block.box.within(Box.whole(block.shape))] = values.view(block.length)
        else:
            tensor = values.view(())
    return tensor
