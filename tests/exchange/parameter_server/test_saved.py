"""Holdings in universal checkpoints: what a single process saves, and back."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
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
from exchange.parameter_server.test_tables import WIDTH, parts_of, tables
from verbund.checkpoint import Checkpoint, Piece, commit, partial_folder, write_part
from verbund.errors import CheckpointError
from verbund.exchange.parameter_server.holdings import Holdings
from verbund.exchange.parameter_server.plan import Block, Plan
from verbund.exchange.parameter_server.push import Part

OPTIMIZERS: list[tuple[str, Any, dict[str, Any]]] = [
    ("sgd", torch.optim.SGD, {}),
    ("sgd", torch.optim.SGD, {"momentum": 0.9}),
    ("adagrad", torch.optim.Adagrad, {"initial_accumulator_value": 0.1}),
    ("adamw", torch.optim.AdamW, {}),
    ("nadam", torch.optim.NAdam, {}),
    ("asgd", torch.optim.ASGD, {}),
]


def save(folder: Path, servers: Iterable[Iterable[Piece]], step: int = 5) -> Checkpoint:
    parts = [write_part(partial_folder(folder, step), part, pieces) for part, pieces in enumerate(servers)]
    return Checkpoint.open(commit(folder, step, parts, {}))


def train(holdings: list[Holdings], tickets: range, unused: str = "") -> None:
    plan = holdings[0].plan
    for ticket in tickets:
        generator = torch.Generator().manual_seed(ticket)
        gradients = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
        for one in holdings:
            parts = [
                Part(n, one.version(n), None if b.name == unused else part_of(b, gradients[b.name]))
                for n, b in enumerate(plan.blocks)
                if n in one
            ]
            send(one, push(parts, ticket))


def split(plan: Plan, values: dict[str, Tensor]) -> list[Holdings]:
    """Two servers."""
    servers = [begun(plan, values), begun(plan, values)]
    for number in range(len(plan.blocks)):
        servers[number % 2].drop(number)
    return servers


def held(holdings: Holdings) -> list[int]:
    return [number for number in range(len(holdings.plan.blocks)) if number in holdings]


@pytest.mark.parametrize(("name", "kind", "arguments"), OPTIMIZERS)
def test_it_is_what_a_single_process_would_save_and_any_division_goes_on_from_it(
    name: str, kind: Any, arguments: dict[str, Any], tmp_path: Path
) -> None:
    values = {key: torch.randn(shape, generator=torch.Generator().manual_seed(9)) for key, shape in SHAPES.items()}
    plan = Plan(tuple(blocks_of(SHAPES)), spec(name, 0.02, **arguments), ASYNCHRONOUS)
    servers = split(plan, values)
    train(servers, range(4))
    theirs = {key: nn.Parameter(value.clone()) for key, value in values.items()}
    optimizer = kind(theirs.values(), lr=0.02, foreach=False, **arguments)
    for ticket in range(4):
        generator = torch.Generator().manual_seed(ticket)
        for parameter in theirs.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    with save(tmp_path, (one.pieces(held(one)) for one in servers)) as checkpoint:
        expected = {f"{k}/{key}" for k, p in theirs.items() for key, v in optimizer.state[p].items() if v is not None}
        assert set(checkpoint.names("optimizer")) == expected
        for key, parameter in theirs.items():
            torch.testing.assert_close(checkpoint.read("parameters", key), parameter.detach())
            for state, value in optimizer.state[parameter].items():
                if value is not None:
                    torch.testing.assert_close(checkpoint.read("optimizer", f"{key}/{state}"), value)
        other = Holdings(Plan(tuple(blocks_of(SHAPES, rows=3)), plan.optimizer, ASYNCHRONOUS))
        for number in range(len(other.plan.blocks)):
            other.load(number, checkpoint, version=4)
            assert other.version(number) == 4
    train(servers, range(4, 8))
    train([other], range(4, 8))
    for key in SHAPES:  # the ends of blocks lie elsewhere, and torch rounds there otherwise
        both = sum((_filled(one, key) for one in servers), torch.zeros(()))
        torch.testing.assert_close(whole(other, key), both, rtol=1e-6, atol=1e-6)


def _filled(holdings: Holdings, name: str) -> Tensor:
    """A tensor of which some blocks are elsewhere: zeros there."""
    tensor = torch.zeros(SHAPES[name])
    for number in held(holdings):
        block = holdings.plan.blocks[number]
        if block.name == name:
            place = tuple(slice(a, a + n) for a, n in zip(block.offset, block.length, strict=True))
            tensor[place] = holdings.read([number]).view(block.length)
    return tensor


@pytest.mark.parametrize("name", ["sgd", "adam", "adagrad", "nadam"])
def test_a_tensor_one_of_whose_blocks_has_not_been_stepped_is_saved_whole(name: str, tmp_path: Path) -> None:
    plan = Plan(
        tuple(blocks_of({"a": (4, 2)})), spec(name, **({"momentum": 0.9} if name == "sgd" else {})), ASYNCHRONOUS
    )
    holdings = begun(plan, {"a": torch.ones(4, 2)})
    send(holdings, push([Part(1, 0, torch.ones(4))]))
    with save(tmp_path, [holdings.pieces([0, 1])]) as checkpoint:
        other = Holdings(plan)
        other.load(0, checkpoint)
    first = push([Part(0, 0, torch.ones(4))], 1)
    send(holdings, first)
    send(other, first)
    torch.testing.assert_close(other.read([0]), holdings.read([0]))


def test_what_has_not_been_used_has_no_state(tmp_path: Path) -> None:
    plan = Plan(tuple(blocks_of(SHAPES, rows=9)), spec("adam"), ASYNCHRONOUS)
    holdings = begun(plan, {key: torch.ones(shape) for key, shape in SHAPES.items()})
    train([holdings], range(2), unused="b.weight")
    with save(tmp_path, [holdings.pieces(range(3))]) as checkpoint:
        assert not [name for name in checkpoint.names("optimizer") if name.startswith("b.weight")]
        holdings.load(2, checkpoint)
    assert holdings.read([2]).tolist() == [1.0] * 12


def test_sums_are_buffers(tmp_path: Path) -> None:
    blocks = (Block("mean", (3,), "float32", (0,), (3,), "sum"), Block("count", (), "int64", (), (), "sum"))
    holdings = begun(Plan(blocks, spec("sgd"), ASYNCHRONOUS), {"mean": torch.ones(3), "count": torch.tensor(7)})
    with save(tmp_path, [holdings.pieces([0, 1])]) as checkpoint:
        assert sorted(checkpoint.names("buffers")) == ["count", "mean"]
        holdings.create(1, torch.tensor(0))
        holdings.load(1, checkpoint)
    assert holdings.read([1]).tolist() == [7]


@pytest.mark.parametrize("name", ["sgd", "adam", "adagrad", "rprop"])
@pytest.mark.parametrize("born", [None, (5, 0.3)])
def test_tables_are_saved_whole_and_divided_in_any_way(
    name: str, born: tuple[int, float] | None, tmp_path: Path
) -> None:
    settings = spec(name, 0.05, **({"initial_accumulator_value": 0.2} if name == "adagrad" else {}))
    holdings = begun(
        Plan(tuple(tables(3, born)), settings, ASYNCHRONOUS), {} if born else {"table": torch.ones(23, WIDTH)}
    )
    generator = torch.Generator().manual_seed(3)

    def step(some: list[Holdings], tickets: range) -> None:
        for ticket in tickets:
            rows = torch.randperm(23, generator=generator)[:5].sort().values
            gradient = torch.randn(5, WIDTH, generator=generator)
            for one in some:
                send(one, push(parts_of(one.plan, rows, gradient, 0), ticket))

    step([holdings], range(4))
    assert sum(len(holdings.image(number).tensors["rows"]) for number in range(3)) < 23
    with save(tmp_path, [holdings.pieces([0, 2]), holdings.pieces([1])]) as checkpoint:
        torch.testing.assert_close(checkpoint.read("parameters", "table"), whole(holdings, "table"))
        other = Holdings(Plan(tuple(tables(2, born)), settings, ASYNCHRONOUS))
        for number in range(2):
            other.load(number, checkpoint, version=4)
    if born:  # which rows there are is known
        known = [
            sum(len(one.image(number).tensors["rows"]) for number in range(len(one.plan.blocks)))
            for one in (holdings, other)
        ]
        assert known[0] == known[1]
    assert torch.equal(whole(other, "table"), whole(holdings, "table"))
    step([holdings, other], range(4, 12))
    torch.testing.assert_close(whole(other, "table"), whole(holdings, "table"), rtol=1e-6, atol=1e-7)


def test_a_table_of_another_strategy_is_loaded_whole(tmp_path: Path) -> None:
    first = torch.arange(23.0 * WIDTH).view(23, WIDTH)
    pieces = [Piece.whole("parameters", "table", first)]
    pieces += [Piece.whole("optimizer", "table/exp_avg", first), Piece.whole("optimizer", "table/exp_avg_sq", first)]
    pieces += [Piece.whole("optimizer", "table/step", torch.tensor(3.0))]
    holdings = Holdings(Plan(tuple(tables(2, (1, 1.0))), spec("adam"), ASYNCHRONOUS))
    with save(tmp_path, [pieces]) as checkpoint:
        for number in range(2):
            holdings.load(number, checkpoint)
    assert torch.equal(whole(holdings, "table"), first)
    image = holdings.image(1)
    assert torch.equal(image.tensors["optimizer/exp_avg"], first[holdings.plan.blocks[1].offset[0] :])
    assert image.tensors["optimizer/step"] == 3.0


def test_of_a_table_of_another_strategy_the_rows_that_were_used_are_kept(tmp_path: Path) -> None:
    plan = Plan(tuple(tables(2, (1, 1.0))), spec("adam"), ASYNCHRONOUS)
    holdings = Holdings(plan)
    for number in range(2):
        holdings.create(number, None)
    first, moment = whole(holdings, "table"), torch.zeros(23, WIDTH)
    first[5] += 1.0
    moment[20, 0] = 0.5
    pieces = [Piece.whole("parameters", "table", first), Piece.whole("optimizer", "table/exp_avg", moment)]
    pieces += [Piece.whole("optimizer", "table/exp_avg_sq", torch.zeros(23, WIDTH))]
    pieces += [Piece.whole("optimizer", "table/step", torch.tensor(3.0))]
    with save(tmp_path, [pieces]) as checkpoint:
        for number in range(2):
            holdings.load(number, checkpoint)
    assert torch.equal(whole(holdings, "table"), first)
    assert [holdings.image(number).tensors["rows"].tolist() for number in range(2)] == [
        [5],
        [20 - plan.blocks[1].offset[0]],
    ]
    assert holdings.image(1).tensors["optimizer/exp_avg"][0, 0] == 0.5


def test_rows_that_nobody_has_changed_are_not_loaded(tmp_path: Path) -> None:
    plan = Plan(tuple(tables(1, (1, 1.0), 5000, 64)), spec("adam"), ASYNCHRONOUS)
    holdings, other = Holdings(plan), Holdings(plan)
    holdings.create(0, None)
    send(holdings, push([Part(0, 0, torch.ones(128), torch.tensor([5, 4000]))]))
    with save(tmp_path, [holdings.pieces([0])]) as checkpoint:
        other.load(0, checkpoint)
        assert torch.equal(other.read_rows(0, torch.arange(9)), holdings.read_rows(0, torch.arange(9)))
    assert other.image(0).tensors["rows"].tolist() == [5, 4000]


def test_a_checkpoint_of_a_table_takes_what_its_rows_take(tmp_path: Path) -> None:
    plan = Plan(tuple(tables(2, (1, 1.0), 1_000_000, 16)), spec("adam"), ASYNCHRONOUS)
    holdings, other = Holdings(plan), Holdings(plan)
    rows = torch.arange(0, 1_000_000, 10_000)
    for number in range(2):
        holdings.create(number, None)
    send(holdings, push(parts_of(plan, rows, torch.ones(100, 16), 0)))
    with save(tmp_path, [holdings.pieces([0]), holdings.pieces([1])]) as checkpoint:
        files = sum(path.stat().st_size for path in checkpoint.manifest.folder.iterdir())
        assert 100 * 16 * 4 * 3 < files < 40_000  # the whole table has 192 MB
        assert torch.equal(checkpoint.gather("parameters", "table", rows), holdings_rows(holdings, rows))
        some = torch.tensor([0, 7, 400_007, 999_999])
        assert torch.equal(checkpoint.gather("parameters", "table", some), holdings_rows(holdings, some))
        for number in range(2):
            other.load(number, checkpoint)
    for number in range(2):
        one, two = holdings.image(number), other.image(number)
        assert one.tensors.keys() == two.tensors.keys()
        assert all(torch.equal(one.tensors[name], two.tensors[name]) for name in one.tensors)


def holdings_rows(holdings: Holdings, rows: Tensor) -> Tensor:
    found = []
    for number, block in enumerate(holdings.plan.blocks):
        low = block.offset[0]
        found.append(holdings.read_rows(number, rows[(rows >= low) & (rows < low + block.length[0])]))
    return torch.cat(found)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_table_with_another_seed_gets_the_rows_that_were_saved(seed: int, tmp_path: Path) -> None:
    """Rows that were not stored are what they were, not what the changed task would have made of them."""
    first = Holdings(Plan(tuple(tables(1, (1, 1.0))), spec("adam"), ASYNCHRONOUS))
    first.create(0, None)
    send(first, push(parts_of(first.plan, torch.tensor([3]), torch.ones(1, WIDTH), 0)))
    other = Holdings(Plan(tuple(tables(1, (seed, 1.0))), spec("adam"), ASYNCHRONOUS))
    with save(tmp_path, [first.pieces([0])]) as checkpoint:
        other.load(0, checkpoint)
    assert torch.equal(whole(other, "table"), whole(first, "table"))
    assert len(other.image(0).tensors["rows"]) == (1 if seed == 1 else 23)


def test_what_does_not_fit_is_said(tmp_path: Path) -> None:
    plan = Plan(tuple(blocks_of(SHAPES)), spec("adam"), ASYNCHRONOUS)
    holdings = Holdings(plan)
    pieces = [
        Piece.whole("parameters", "a.weight", torch.ones(3, 3)),
        Piece.whole("parameters", "a.bias", torch.ones(5).double()),
    ]
    with save(tmp_path, [pieces]) as checkpoint:
        with pytest.raises(CheckpointError, match=r"`a.weight` has shape \[3, 3\], \[7, 5\] is wanted"):
            holdings.load(0, checkpoint)
        with pytest.raises(CheckpointError, match=r"`a.bias` has dtype float64, float32 is wanted"):
            holdings.load(4, checkpoint)
        with pytest.raises(CheckpointError, match=r"holds no parameters `b.weight`"):
            holdings.load(7, checkpoint)
