"""Models whose tables lie elsewhere, against ordinary embeddings with sparse gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from verbund import Table
from verbund.errors import InputError, TaskError
from verbund.exchange.parameter_server.remote import RemoteTables
from verbund.randomness.rows import born
from verbund.tables import bare


class Counting:
    """Rows of given tables; remembers what it was asked for."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        self.values = values
        self.asked: list[dict[str, list[int]]] = []

    def pull(self, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
        for rows in wanted.values():
            assert rows.dtype == torch.int64
            assert bool((rows[1:] > rows[:-1]).all())
        self.asked.append({name: rows.tolist() for name, rows in wanted.items()})
        return {name: self.values[name][rows] for name, rows in wanted.items()}


class Words(nn.Module):
    """Several tables, tied ones among them, with dense layers on top."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(30, 6, padding_idx=3, sparse=True)
        self.table = Table(30, 6, scale=0.5, seed=4)
        self.again = self.table
        self.tied = nn.Embedding(30, 6, sparse=True)
        self.tied.weight = self.words.weight
        self.mean = nn.EmbeddingBag(30, 6, sparse=True)
        self.sum = nn.EmbeddingBag(30, 6, mode="sum", sparse=True, padding_idx=0)
        self.plain = nn.Embedding(30, 6)
        self.head = nn.Linear(6, 4)

    def forward(self, ids: Tensor) -> Tensor:
        found = self.words(ids) * self.tied(ids + 1) + self.table(ids) * self.again(ids.flip(0)) + self.plain(ids)
        bags = self.mean(ids) + self.sum(ids, per_sample_weights=torch.linspace(0, 1, ids.numel()).view_as(ids))
        out: Tensor = self.head(torch.tanh(found.sum(1) + bags))
        return out


def pair(model: nn.Module) -> tuple[nn.Module, nn.Module, RemoteTables, Counting]:
    """The model, a copy of it without tables, and what answers in their place."""
    for module in model.modules():
        if isinstance(module, Table):
            module.sparse = True
    other = copy.deepcopy(model)
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    remote = RemoteTables.install(other)
    rows = Counting(values)
    remote.rows = rows
    return model, other, remote, rows


def compare(model: nn.Module, remote: RemoteTables, other: nn.Module) -> None:
    """The gradients of the two."""
    expected = dict(model.named_parameters())
    found = remote.gradients()
    names = {table.name for table in remote.tables}
    for name, parameter in other.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad)
    for name in names:
        gradient = expected[name].grad
        if gradient is None:
            assert name not in found
            continue
        gradient = gradient.coalesce()
        rows, values = found[name]
        assert rows.tolist() == gradient.indices()[0].tolist(), name
        torch.testing.assert_close(values, gradient.values(), rtol=1e-5, atol=1e-6)


IDS = torch.tensor([[5, 3, 5, 28], [0, 1, 3, 3], [7, 7, 7, 7]])


def test_outputs_and_gradients_are_those_of_ordinary_embeddings() -> None:
    model, other, remote, rows = pair(Words())
    assert [table.name for table in remote.tables] == ["words.weight", "table.weight", "mean.weight", "sum.weight"]
    assert not {name for name, _ in other.named_parameters()} & {table.name for table in remote.tables}
    for micro_batch in (IDS, IDS.flip(0)[:2], IDS.int()):
        expected, found = model(micro_batch), other(micro_batch)
        torch.testing.assert_close(found, expected)
        (expected * torch.arange(4.0)).sum().backward()
        (found * torch.arange(4.0)).sum().backward()
    compare(model, remote, other)
    # Each row was asked for once, though there were tied tables and several micro-batches.
    for table in remote.tables:
        asked = [row for request in rows.asked for row in request.get(table.name, ())]
        assert len(asked) == len(set(asked))
    remote.clear()
    assert remote.gradients() == {}
    other(IDS)
    assert rows.asked[-1]


def test_all_tables_in_one_request() -> None:
    model, other, remote, rows = pair(Words())
    wanted = {"words": IDS, "tied": IDS + 1, "again": IDS, "mean": IDS, "sum.weight": torch.cat([IDS, IDS + 1])}
    remote.fetch(wanted)
    other(IDS).sum().backward()
    assert len(rows.asked) == 1
    assert rows.asked[0]["words.weight"] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 28, 29]
    model(IDS).sum().backward()
    compare(model, remote, other)  # rows that were fetched but not used have no gradient
    remote.fetch({"words": torch.tensor([5, 9])})
    assert rows.asked[1:] == [{"words.weight": [9]}]
    remote.fetch({"words": torch.tensor([9])})
    remote.fetch({})
    assert len(rows.asked) == 2
    with pytest.raises(TaskError, match=r"`wrods`.*Did you mean `words`"):
        remote.fetch({"wrods": IDS})
    with pytest.raises(IndexError, match=r"index 30 .*`words.weight`"):
        remote.fetch({"words": torch.tensor([30, 31])})


def test_evaluation_keeps_nothing_for_training() -> None:
    model, other, remote, rows = pair(Words())
    model.eval()
    other.eval()
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            torch.testing.assert_close(other(IDS), model(IDS))
            count = len(rows.asked)
            other(IDS)
            assert len(rows.asked) == 2 * count  # what nobody has fetched is asked for again
            remote.fetch({"words": IDS, "tied": IDS + 1, "table": IDS, "mean": IDS, "sum": IDS})
            rows.asked.clear()
            torch.testing.assert_close(other(IDS), model(IDS))
            assert rows.asked == []
            remote.fetch({"words": IDS})
            other(IDS)
            assert rows.asked[0] == {"words.weight": [0, 1, 3, 5, 7, 28]}
        rows.asked.clear()
    assert remote.gradients() == {}
    other.train()
    other(IDS).sum().backward()
    assert rows.asked[0]["words.weight"] == [0, 1, 3, 5, 7, 28]
    assert set(remote.gradients()) == {table.name for table in remote.tables}


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("last", [False, True])
def test_bags_with_offsets(mode: str, last: bool) -> None:
    model, other, remote, _ = pair(nn.EmbeddingBag(20, 3, mode=mode, sparse=True, include_last_offset=last))
    ids = torch.tensor([4, 4, 19, 0, 7])
    offsets = torch.tensor([0, 3, 3, 5] if last else [0, 3, 3])
    weights = (torch.randn(5),) if mode == "sum" else ()
    expected, found = model(ids, offsets, *weights), other(ids, offsets, *weights)
    torch.testing.assert_close(found, expected)
    (expected**2).sum().backward()
    (found**2).sum().backward()
    assert remote.tables[0].name == "weight"
    compare(model, remote, other)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4)])
def test_no_ids(shape: tuple[int, ...]) -> None:
    model, other, remote, rows = pair(nn.Embedding(20, 3, sparse=True))
    ids = torch.empty(shape, dtype=torch.int64)
    found = other(ids)
    torch.testing.assert_close(found, model(ids))
    found.sum().backward()
    assert rows.asked == []
    assert all(len(values) == 0 for _, values in remote.gradients().values())


def test_a_table_that_the_loss_does_not_depend_on() -> None:
    model, other, remote, _ = pair(nn.ModuleDict({"a": Table(9, 2), "b": Table(9, 2, seed=1)}))
    for each in (model, other):
        (each["a"](torch.tensor([1, 2])).sum() + each["b"](torch.tensor([3])).detach().sum()).backward()  # type: ignore[index]
    compare(model, remote, other)
    assert list(remote.gradients()) == ["a.weight"]


def test_frozen_tables() -> None:
    model = nn.Sequential(nn.Embedding(9, 2, sparse=True), nn.Linear(2, 2))
    model[0].weight.requires_grad_(False)  # type: ignore[union-attr, operator]
    _, other, remote, _ = pair(model)
    other(torch.tensor([1])).sum().backward()
    assert remote.gradients() == {}
    assert not remote.tables[0].trained


def test_activation_checkpointing_asks_and_counts_once() -> None:
    model, other, remote, rows = pair(Words())
    checkpoint(other, IDS, use_reentrant=False).sum().backward()
    model(IDS).sum().backward()
    compare(model, remote, other)
    for table in remote.tables:
        asked = [row for request in rows.asked for row in request.get(table.name, ())]
        assert len(asked) == len(set(asked))


def test_float64_and_half() -> None:
    for dtype in (torch.float64, torch.bfloat16):
        model = Words().to(dtype)
        first = model.table.weight.detach().clone()
        assert not first.is_meta
        remote = RemoteTables.install(model)
        assert {table.dtype for table in remote.tables} == {dtype}
        assert [table.born for table in remote.tables if table.born] == [(4, 0.5)]
        assert torch.equal(model.table(IDS), first[IDS])


def test_bare_tables_are_born() -> None:
    with bare():
        model = nn.Sequential(Table(10**12, 5, scale=0.3, seed=8), nn.Linear(5, 2))
    remote = RemoteTables.install(model)
    (table,) = remote.tables
    assert table.born == (8, 0.3)
    assert table.shape == (10**12, 5)
    assert remote.first == {}
    ids = torch.tensor([[10**12 - 1, 4]])
    expected = born(8, ids[0], 5, 0.3)[None]
    assert torch.equal(model[0](ids), expected)
    assert model.double()[0] is model[0]
    assert "seed=8" in repr(model)


def test_first_values_of_tables_that_are_not_born() -> None:
    model = Words()
    with torch.no_grad():
        model.table.weight.mul_(2)  # no longer as it was born
    values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    remote = RemoteTables.install(model)
    assert {table.name for table in remote.tables if table.born} == set()
    assert torch.equal(model.table(IDS), values["table.weight"][IDS])
    for name, first in remote.first.items():
        assert torch.equal(first, values[name])


@pytest.mark.parametrize("ids", [[-1, 3], [2, 30]])
def test_rows_out_of_range(ids: list[int]) -> None:
    _, other, _, rows = pair(Words())
    wrong = next(number for number in ids if not 0 <= number < 30)
    with pytest.raises(IndexError, match=rf"index {wrong} is out of range for the table `table.weight` of 30 rows"):
        other.table(torch.tensor(ids))  # type: ignore[operator]
    assert rows.asked == []
    with pytest.raises(RuntimeError, match="to have one of the following scalar types"):
        other.table(torch.tensor([1.0]))  # type: ignore[operator]


class Own(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * 2


class Subclass(nn.Embedding):
    def double_up(self, ids: Tensor) -> Tensor:
        return torch.cat([self(ids), self(ids)])


def tied_to_linear() -> nn.Module:
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 5, bias=False))
    model[1].weight = model[0].weight
    return model


def parametrised() -> nn.Module:
    embedding = nn.Embedding(5, 4, sparse=True)
    return nn.Sequential(torch.nn.utils.parametrizations.weight_norm(embedding))


def changed() -> nn.Module:
    with bare():
        model = nn.Sequential(Table(5, 4), nn.Linear(4, 4))
    nn.init.normal_(model[0].weight)  # type: ignore[arg-type]
    return model


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: nn.Sequential(nn.Embedding(5, 4, max_norm=1.0, sparse=True)), "`0` has `max_norm`"),
        (lambda: nn.Sequential(nn.EmbeddingBag(5, 4, max_norm=1.0, sparse=True)), "`0` has `max_norm`"),
        (lambda: nn.Sequential(nn.Embedding(5, 4, scale_grad_by_freq=True, sparse=True)), "scale_grad_by_freq"),
        (lambda: nn.Sequential(nn.EmbeddingBag(5, 4, mode="max", sparse=True)), 'the mode "max"'),
        (lambda: nn.Sequential(Own(5, 4, sparse=True)), r"forward pass of its own \(Own\)"),
        (tied_to_linear, "`1.weight` is tied to the table `0.weight`, and needs all of its rows"),
        (parametrised, "parametrised"),
        (changed, "`0.weight` is given other values after it was made"),
    ],
)
def test_what_cannot_lie_on_servers(build: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(InputError, match=message):
        RemoteTables.install(build())


def test_the_rest_of_a_users_class_stays() -> None:
    calls: list[Any] = []
    embedding = Subclass(9, 3, sparse=True)
    embedding.register_forward_hook(lambda module, args, output: calls.append(args))
    weight = embedding.weight.detach()
    RemoteTables.install(embedding)
    assert isinstance(embedding, Subclass)
    assert torch.equal(embedding.double_up(torch.tensor([4])), weight[[4, 4]])
    assert len(calls) == 2
    assert not hasattr(embedding, "weight")
    with pytest.raises(AttributeError, match="`weight` lies on the parameter servers"):
        _ = embedding.weight
    with pytest.raises(AttributeError, match="other"):
        _ = embedding.other
    assert embedding(torch.empty(2, 2, dtype=torch.int64, device="meta")).shape == (2, 2, 3)
