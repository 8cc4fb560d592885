"""Embedding tables: tables of which rows are made when they are first asked for, and what a model says of its tables.

Under a parameter server a model's tables lie on servers, and a worker holds but the rows that its samples touch. Tables
are every `Table`, and `nn.Embedding(..., sparse=True)` and `nn.EmbeddingBag(..., sparse=True)`. Anywhere else they are
ordinary parameters, trained with dense gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.library import Library

from verbund.randomness.rows import born

# An operation of the dispatcher, so that a recorded constructor can be replayed.
_library = Library("verbund", "DEF")  # type: ignore[no-untyped-call]
_library.define("born_(Tensor(a!) weight, int seed, float scale) -> Tensor(a!)")  # type: ignore[no-untyped-call]
_AT_ONCE = 1 << 20
_bare = False


class Table(nn.Embedding):
    """An embedding whose row r begins as a function of (seed, r): normal numbers with standard deviation `scale`.

    On parameter servers a row comes into being when it is first asked for, so that a table takes the memory of the rows
    that data touch. Everywhere else this is an ordinary embedding with exactly these values.

    Args:
        rows: how many there can be: ids are 0 … rows - 1.
        dim: numbers of a row.
        scale: see above; 0: all rows begin at 0.
        seed: see above. Tables of one width and one seed begin alike; give those that should not different seeds.
    """

    def __init__(self, rows: int, dim: int, scale: float = 0.05, seed: int = 0) -> None:
        if rows < 1 or dim < 1:
            raise ValueError(f"a table of {rows} rows of {dim} numbers holds nothing")
        if not (math.isfinite(scale) and scale >= 0):
            raise ValueError(f"a table's `scale` is a standard deviation, which {scale} is not")
        super().__init__(rows, dim, _weight=torch.empty(rows, dim, device="meta" if _bare else None))
        self.scale, self.seed = float(scale), int(seed)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Gives all rows their first values."""
        if hasattr(self, "seed"):
            with torch.no_grad():
                torch.ops.verbund.born_(self.weight, self.seed, self.scale)
            self.weight._born = (self.seed, self.scale, self.weight._version)  # type: ignore[attr-defined]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, scale={self.scale}, seed={self.seed}"


def _born(weight: Tensor, seed: int, scale: float) -> Tensor:
    rows, width = weight.shape
    step = max(1, _AT_ONCE // width)
    for low in range(0, rows, step):
        high = min(low + step, rows)
        weight[low:high] = born(seed, torch.arange(low, high), width, scale)
    return weight


_library.impl("born_", _born, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_library.impl("born_", lambda weight, seed, scale: weight, "Meta")  # type: ignore[no-untyped-call]


def born_as(weight: Tensor) -> tuple[int, float] | None:
    """Seed and scale of a table's weight whose rows are as a `Table` has made them; None if they have changed since, or
    were never born."""
    seed, scale, version = getattr(weight, "_born", (0, 0.0, -1))
    return (seed, scale) if version == weight._version else None


@contextmanager
def bare() -> Iterator[None]:
    """A `Table` that is made within the block has no memory: its weight is on the meta device."""
    global _bare
    former, _bare = _bare, True
    try:
        yield
    finally:
        _bare = former


def tables(model: nn.Module) -> dict[str, nn.Embedding | nn.EmbeddingBag]:
    """The modules of a model that are tables for a parameter server, by their first names."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Table) or is_sparse(module)}


def is_sparse(module: nn.Module) -> bool:
    """Whether a module is an embedding with sparse gradients."""
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse


def train_densely(model: nn.Module) -> list[str]:
    """Has all embeddings of a model give dense gradients, which are the same numbers.

    Returns:
        the names of those that had sparse ones.
    """
    names = [name for name, module in model.named_modules() if is_sparse(module)]
    for name in names:
        embedding = model.get_submodule(name)
        assert isinstance(embedding, (nn.Embedding, nn.EmbeddingBag))
        embedding.sparse = False
    return names


def begin_alike(model: nn.Module) -> list[list[str]]:
    """The names of each two or more `Table`s of a model that have equal rows at first."""
    found: dict[tuple[int, int], list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, Table) and module.scale:
            found.setdefault((module.embedding_dim, module.seed), []).append(name)
    return [names for names in found.values() if len(names) > 1]
