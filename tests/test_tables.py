"""Embedding tables outside of a parameter server: ordinary embeddings."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

import verbund
from verbund.mesh import initial
from verbund.randomness.rows import born
from verbund.tables import Table, bare, begin_alike, tables, train_densely


def test_a_table_is_an_embedding_with_born_rows() -> None:
    table = verbund.Table(1000, 7, scale=0.3, seed=5)
    assert type(table) is Table
    assert isinstance(table, nn.Embedding)
    assert table.weight.requires_grad
    assert torch.equal(table.weight, born(5, torch.arange(1000), 7, 0.3))
    assert torch.equal(table(torch.tensor([[3, 999]])), table.weight[[3, 999]][None])
    assert torch.equal(verbund.Table(10, 7, scale=0.3, seed=5).weight, table.weight[:10])
    assert not verbund.Table(10, 7, scale=0.0).weight.any()
    assert "scale=0.3, seed=5" in repr(table)
    with torch.no_grad():
        table.weight.zero_()
    table.reset_parameters()
    assert torch.equal(table.weight[1], born(5, torch.tensor([1]), 7, 0.3)[0])
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(Table(10, 7, 0.3, 5).weight, table.weight[:10].double())
    finally:
        torch.set_default_dtype(torch.float32)


def test_no_generator_is_asked() -> None:
    torch.manual_seed(0)
    Table(100, 3)
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("arguments", [(0, 3), (3, 0), (3, 3, -1.0), (3, 3, float("nan"))])
def test_nonsense_is_refused(arguments: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="table"):
        Table(*arguments)  # type: ignore[arg-type]


def test_a_bare_table_has_no_memory() -> None:
    with bare():
        table = Table(10**12, 64)
        other = nn.Embedding(3, 3)
    assert table.weight.is_meta
    assert not other.weight.is_meta
    assert not Table(3, 3).weight.is_meta
    with torch.device("meta"):
        assert Table(10**12, 64).weight.is_meta


def test_a_recorded_constructor_gives_the_same_rows() -> None:
    def build() -> nn.Module:
        return nn.ModuleDict({"a": nn.Linear(3, 3), "table": Table(50, 4, 0.1, 2), "b": nn.Embedding(5, 5)})

    recorded = initial.record(build, 3)
    assert all(parameter.is_meta for parameter in recorded.model.parameters())
    recorded.fill(lambda name, values: values)
    torch.manual_seed(3)
    for (name, expected), found in zip(build().named_parameters(), recorded.model.parameters(), strict=True):
        assert torch.equal(found, expected), name


def test_which_modules_are_tables() -> None:
    model = nn.ModuleDict(
        {
            "plain": nn.Embedding(3, 3),
            "sparse": nn.Embedding(3, 3, sparse=True),
            "bag": nn.EmbeddingBag(3, 3, sparse=True, mode="sum"),
            "table": Table(3, 3),
            "alike": Table(4, 3),
            "other": Table(3, 3, seed=1),
        }
    )
    assert list(tables(model)) == ["sparse", "bag", "table", "alike", "other"]
    assert begin_alike(model) == [["table", "alike"]]
    assert train_densely(model) == ["sparse", "bag"]
    assert train_densely(model) == []


def test_the_package_gives_it_without_having_imported_torch() -> None:
    code = "import sys, verbund; print('torch' in sys.modules); verbund.Table; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
