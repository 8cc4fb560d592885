"""What is wrong with a push is said before anything is changed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from exchange.parameter_server.holding import begun, push, spec
from verbund.errors import InputError
from verbund.exchange.parameter_server.holdings import Holdings
from verbund.exchange.parameter_server.plan import Block, Plan, Rule
from verbund.exchange.parameter_server.push import Part

BLOCKS = (
    Block("a", (2, 2), "float32", (0, 0), (2, 2)),
    Block("t", (9, 2), "float32", (3, 0), (4, 2), "rows"),
    Block("s", (2,), "float32", (0,), (2,), "sum"),
    Block("away", (2,), "float32", (0,), (2,)),
)
ONES = torch.ones(4)


@pytest.fixture
def holdings() -> Holdings:
    plan = Plan(BLOCKS, spec("adam"), Rule("synchronous", staleness=2, shares=3))
    found = begun(plan, {"a": torch.zeros(2, 2), "t": torch.zeros(9, 2), "s": torch.zeros(2), "away": torch.zeros(2)})
    found.drop(3)
    return found


def rows(*numbers: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(numbers, dtype=dtype)


@pytest.mark.parametrize(
    ("part", "what"),
    [
        (Part(9, 0, ONES), "there is no block 9: the plan has 4"),
        (Part(-1, 0, ONES), "there is no block -1"),
        (Part(3, 0, torch.ones(2)), r"block 3 \(`away` \[0:2\]\) is not here"),
        (Part(0, 0, torch.ones(3)), r"block 0 \(`a`\): 4 values in a row are needed, and there are \[3\]"),
        (Part(0, 0, torch.ones(2, 2)), r"there are \[2, 2\]"),
        (Part(0, 0, ONES.double()), "has dtype float32, and the values have float64"),
        (Part(0, 0, torch.tensor([1.0, math.nan, 1.0, 1.0])), "not all values are finite"),
        (Part(0, 0, torch.tensor([math.inf, -math.inf, 1.0, 1.0])), "not all values are finite"),
        (Part(0, 1, ONES), "is at version 0, and the gradient is said to be of 1"),
        (Part(0, -1, ONES), "is said to be of -1"),
        (Part(0, 0, ONES, rows(0, 1)), "is no table, and rows of it are named"),
        (Part(1, 0, ONES), "is a table, and no rows of it are named"),
        (Part(1, 0, ONES, rows(2, 4)), "row 2 is not among its rows, 3 to 6"),
        (Part(1, 0, ONES, rows(3, 7)), "row 7 is not among its rows, 3 to 6"),
        (Part(1, 0, ONES, rows(4, 3)), "rows are not ascending, each once"),
        (Part(1, 0, ONES, rows(4, 4)), "rows are not ascending, each once"),
        (Part(1, 0, ONES, rows(3, 4, dtype=torch.int32)), "rows are named by int64 numbers"),
        (Part(1, 0, ONES, rows(3)), "2 values in a row are needed"),
        (Part(1, 0, None, rows(3)), "there are rows, but no values"),
    ],
)
def test_parts(holdings: Holdings, part: Part, what: str) -> None:
    with pytest.raises(InputError, match=what) as error:
        holdings.check(push([Part(2, 0, torch.ones(2)), part]))
    assert holdings.version(2) == 0
    assert "not here" in what or "no block" in what or "push of ticket 0, share 0, by client 0" in str(error.value)


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"share": 3}, "share 3 of a ticket that is divided into 3"),
        ({"share": -1}, "`share` is -1"),
        ({"ticket": -1}, "`ticket` is -1"),
        ({"ticket": 1.0}, "`ticket` is 1.0"),
        ({"ticket": True}, "`ticket` is True"),
        ({"ticket": 40}, "is at ticket 0, which is too far behind"),
        ({"low": -1}, "`low` is -1"),
        ({"weight": -1.0}, "`weight` is -1.0"),
        ({"weight": math.nan}, "`weight` is nan"),
        ({"scale": math.inf}, "`scale` is inf"),
        ({"rate": -0.1}, "`rate` is -0.1"),
    ],
)
def test_heads(holdings: Holdings, settings: dict[str, Any], what: str) -> None:
    with pytest.raises(InputError, match=what):
        holdings.check(push([Part(0, 0, ONES)], **settings))


def test_a_block_comes_once_in_a_push(holdings: Holdings) -> None:
    with pytest.raises(InputError, match="it has block 0 twice"):
        holdings.check(push([Part(0, 0, ONES), Part(2, 0, None), Part(0, 0, ONES)]))


def test_large_values_are_finite(holdings: Holdings) -> None:
    holdings.check(push([Part(0, 0, torch.full((4,), 3e38)), Part(1, 0, torch.empty(0), rows())]))


def test_outstanding_tickets_are_bounded() -> None:
    plan = Plan(BLOCKS[:1], spec("sgd"), Rule("asynchronous"))
    holdings = begun(plan, {"a": torch.zeros(2, 2)})
    with pytest.raises(InputError, match="too far behind"):
        holdings.check(push([Part(0, 0, ONES)], 1 << 30))
    holdings.check(push([Part(0, 0, ONES)], 1 << 30, low=(1 << 30) - 5))


def test_beginnings_and_reads_are_checked(holdings: Holdings) -> None:
    with pytest.raises(InputError, match=r"block 0 \(`a`\) is float32 \[2, 2\], and begins with float32 \[3\]"):
        holdings.create(0, torch.ones(3))
    with pytest.raises(InputError, match="begins with float64"):
        holdings.create(0, torch.ones(2, 2).double())
    with pytest.raises(InputError, match="begins without values"):
        holdings.create(1, None)
    with pytest.raises(InputError, match="is a table"):
        holdings.read([0, 1])
    with pytest.raises(InputError, match="is no table"):
        holdings.read_rows(0, rows(0))
    with pytest.raises(InputError, match="row 9 is not among its rows"):
        holdings.read_rows(1, rows(3, 9, 4))
    with pytest.raises(InputError, match="not here"):
        holdings.read([3])
    plan = Plan((Block("n", (2,), "int64", (0,), (2,)),), spec("sgd"), Rule("asynchronous"))
    with pytest.raises(InputError, match="no optimiser steps"):
        Holdings(plan).create(0, torch.ones(2, dtype=torch.int64))
