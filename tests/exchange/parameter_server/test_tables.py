"""Tables against torch's sparse embeddings, and what they cost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from exchange.parameter_server.holding import ASYNCHRONOUS, begun, push, send, spec, whole
from verbund.checkpoint.box import Box
from verbund.exchange.parameter_server.holdings import Holdings
from verbund.exchange.parameter_server.plan import Block, Plan, cut
from verbund.exchange.parameter_server.push import Part
from verbund.mesh.ftrl import FTRL

ROWS, WIDTH = 23, 3


def tables(runs: int, born: tuple[int, float] | None = None, rows: int = ROWS, width: int = WIDTH) -> list[Block]:
    """One table in so many runs of rows."""
    bytes_of_a_run = -(-rows // runs) * width * 4
    dense = cut("table", (rows, width), "float32", Box.whole((rows, width)), bytes_of_a_run, 4)
    return [Block(b.name, b.shape, b.dtype, b.offset, b.length, "rows", born) for b in dense]


def parts_of(plan: Plan, rows: Tensor, gradient: Tensor, base: int) -> list[Part]:
    """A sparse gradient of the table, by blocks: all of them, also where it has no rows."""
    parts = []
    for number, block in enumerate(plan.blocks):
        here = (rows >= block.offset[0]) & (rows < block.offset[0] + block.length[0])
        parts.append(Part(number, base, gradient[here].reshape(-1), rows[here]))
    return parts


def draws(steps: int, rows: int = ROWS) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows and their gradients; in one step there are none."""
    generator = torch.Generator().manual_seed(4)
    for step in range(steps):
        some = torch.randperm(rows, generator=generator)[: 0 if step == 3 else 5].sort().values
        yield some, torch.randn((len(some), WIDTH), generator=generator)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("runs", [1, 3])
@pytest.mark.parametrize(
    ("name", "kind", "arguments"),
    [
        ("sgd", torch.optim.SGD, {}),
        ("adagrad", torch.optim.Adagrad, {"initial_accumulator_value": 0.1}),
        ("adagrad", torch.optim.Adagrad, {"lr_decay": 0.01}),
        ("adam", torch.optim.SparseAdam, {"eps": 1e-12}),  # torch adds it at another place than in Adam
    ],
)
def test_100_steps_equal_torchs_sparse_ones(name: str, kind: Any, arguments: dict[str, Any], runs: int) -> None:
    generator = torch.Generator().manual_seed(1)
    first = torch.randn((ROWS, WIDTH), generator=generator)
    plan = Plan(tuple(tables(runs)), spec(name, 0.05, **arguments), ASYNCHRONOUS)
    holdings = begun(plan, {"table": first})
    theirs = nn.Parameter(first.clone())
    optimizer = kind([theirs], lr=0.05, **arguments)
    for ticket, (rows, gradient) in enumerate(draws(100)):
        theirs.grad = torch.sparse_coo_tensor(rows[None], gradient, (ROWS, WIDTH), check_invariants=True)
        optimizer.step()
        send(holdings, push(parts_of(plan, rows, gradient * 4, ticket), ticket, weight=4.0))
    torch.testing.assert_close(whole(holdings, "table"), theirs.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("sgd", {"momentum": 0.9, "weight_decay": 0.01}),
        ("sgd", {"momentum": 0.9, "nesterov": True}),
        ("adamw", {"weight_decay": 0.1}),
        ("rmsprop", {"momentum": 0.3, "centered": True}),
        ("rprop", {}),
        ("nadam", {}),
        ("ftrl", {"l1": 0.3}),
    ],
)
def test_100_steps_equal_a_loop_over_touched_rows(name: str, arguments: dict[str, Any]) -> None:
    """Each row has an optimiser of its own, whose counters are the table's."""
    generator = torch.Generator().manual_seed(1)
    first = torch.randn((ROWS, WIDTH), generator=generator)
    plan = Plan(tuple(tables(3)), spec(name, 0.05, **arguments), ASYNCHRONOUS)
    holdings = begun(plan, {"table": first})
    kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW, "rmsprop": torch.optim.RMSprop}
    kind |= {"rprop": torch.optim.Rprop, "nadam": torch.optim.NAdam, "ftrl": FTRL}
    settings = arguments if name == "ftrl" else {**arguments, "foreach": False}
    rows_alone = [nn.Parameter(row.clone()) for row in first]
    optimizers = [kind[name]([row], lr=0.05, **settings) for row in rows_alone]
    clock = nn.Parameter(torch.zeros(WIDTH))
    counting = kind[name]([clock], lr=0.05, **settings)
    for ticket, (rows, gradient) in enumerate(draws(100)):
        before = {key: value.clone() for key, value in counting.state[clock].items() if value.dim() == 0}
        clock.grad = torch.zeros(WIDTH)
        counting.step()
        for row, own in zip(rows.tolist(), gradient, strict=True):
            rows_alone[row].grad = own.clone()
            state = optimizers[row].state[rows_alone[row]]
            if before and not state:  # lets torch begin its state, and then sets the clock
                rows_alone[row].grad = torch.zeros(WIDTH)
                kept = rows_alone[row].detach().clone()
                optimizers[row].step()
                rows_alone[row].data.copy_(kept)
                for key, value in state.items():
                    if value.dim() and key != "step_size":
                        value.zero_()
                rows_alone[row].grad = own.clone()
            state.update({key: value.clone() for key, value in before.items()})
            optimizers[row].step()
        send(holdings, push(parts_of(plan, rows, gradient, ticket), ticket))
    expected = torch.stack([row.detach() for row in rows_alone])
    torch.testing.assert_close(whole(holdings, "table"), expected, rtol=1e-6, atol=1e-6)


def test_rows_are_born_alike_wherever_and_whenever() -> None:
    once, thrice = (Holdings(Plan(tuple(tables(runs, (7, 0.5))), spec("adam"), ASYNCHRONOUS)) for runs in (1, 3))
    for holdings in (once, thrice):
        for number in range(len(holdings.plan.blocks)):
            holdings.create(number, None)
    asked = torch.tensor([3, 1, 3, 20])
    rows = once.read_rows(0, asked)
    assert torch.equal(rows[0], rows[2])
    assert torch.equal(rows, whole(thrice, "table")[asked])
    assert torch.equal(rows, once.read_rows(0, asked))
    send(once, push([Part(0, 0, torch.ones(WIDTH), torch.tensor([3]))]))
    torch.testing.assert_close(once.read_rows(0, asked)[0], rows[0] - 0.1)
    assert torch.equal(once.read_rows(0, asked)[[1, 3]], rows[[1, 3]])
    other = Holdings(Plan(tuple(tables(1, (8, 0.5))), spec("adam"), ASYNCHRONOUS))
    other.create(0, None)
    assert not torch.equal(other.read_rows(0, asked), rows)


def test_first_values_are_normal() -> None:
    holdings = Holdings(Plan(tuple(tables(1, (1, 0.25), 4000, 16)), spec("sgd"), ASYNCHRONOUS))
    holdings.create(0, None)
    values = holdings.read_rows(0, torch.arange(4000)).double()
    assert abs(values.mean()) < 0.005
    assert abs(values.std() - 0.25) < 0.005
    assert abs(torch.corrcoef(values.T)[0, 1:]).max() < 0.08


def resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


def test_a_table_takes_the_memory_of_its_rows() -> None:
    """10 million rows are 2.6 GB with their moments 7.7."""
    plan = Plan(tuple(tables(1, (7, 0.1), 10_000_000, 64)), spec("adam"), ASYNCHRONOUS)
    before = resident()
    holdings = Holdings(plan)
    holdings.create(0, None)
    generator = torch.Generator().manual_seed(2)
    for ticket in range(3):
        rows = torch.randint(10_000_000, (1000,), generator=generator).unique()
        send(holdings, push([Part(0, ticket, torch.ones(len(rows) * 64), rows)], ticket))
        holdings.read_rows(0, rows)
    assert holdings.image(0).tensors["values"].shape[0] <= 3000
    assert resident() - before < 150 << 20
