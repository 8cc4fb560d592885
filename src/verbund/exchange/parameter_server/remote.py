"""A model in a worker of a parameter server: its embedding tables lie on the servers, and rows come when they are used.

A forward pass asks for the rows that its input names, each once, and computes with them as a small table of its own. So
autograd gives the gradient of these rows, and nothing in a worker has the size of a table.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from verbund.errors import InputError, TaskError, nearest
from verbund.exchange.parameter_server.lookup import WHOLE, become_remote, check
from verbund.exchange.parameter_server.pulled import FirstRows, Pulled, RemoteTable, Rows
from verbund.tables import born_as, tables


@dataclass(frozen=True)
class _Use:
    """One lookup: the rows, the small table that autograd knows, and the place of the row that gets no gradient."""

    rows: Tensor
    leaf: Tensor
    padding: int | None


class RemoteTables:
    """The tables of a model that `install` took out of it.

    Args:
        tables: by the names of their tensors.
        paths: the same by the modules that look up in them.
        first: the first values of those that are not born, for whoever gives them to the servers.
    """

    def __init__(
        self, tables: Mapping[str, RemoteTable], paths: Mapping[str, RemoteTable], first: dict[str, Tensor]
    ) -> None:
        self.tables = tuple(tables.values())
        self.first = first
        self._known = {**paths, **tables}
        self._pulled = Pulled(tables, FirstRows(tables, first))
        self._uses: dict[str, list[_Use]] = {}

    @staticmethod
    def install(model: nn.Module) -> RemoteTables:
        """Takes the tables out of a model (see `verbund.tables`), in place: the modules stay, their weights go.

        A worker that is to have no memory of a `Table` builds the model within `verbund.tables.bare`.

        Raises:
            InputError: naming the module whose table cannot lie on servers.
        """
        modules = tables(model)
        weights: dict[int, RemoteTable] = {}
        first: dict[str, Tensor] = {}
        for path, module in modules.items():
            check(path, module)
            weight = module.weight
            if id(weight) not in weights:
                table = weights[id(weight)] = _described(f"{path}.weight" if path else "weight", weight)
                if table.born is None:
                    first[table.name] = weight.detach()
        _refuse_other_uses(model, modules, weights)
        of_module = {id(module): weights[id(module.weight)] for module in modules.values()}
        every = model.named_modules(remove_duplicate=False)
        paths = {path: of_module[id(module)] for path, module in every if id(module) in of_module}
        remote = RemoteTables({table.name: table for table in weights.values()}, paths, first)
        for module in modules.values():
            table = of_module[id(module)]
            become_remote(module, table.name, functools.partial(remote.use, table))
        return remote

    @property
    def names(self) -> list[str]:
        """Of the tables' tensors."""
        return [table.name for table in self.tables]

    @property
    def rows(self) -> Rows:
        """Where rows come from: they are the first ones until whoever has the servers sets this."""
        return self._pulled.rows

    @rows.setter
    def rows(self, rows: Rows) -> None:
        self._pulled.rows = rows

    def fetch(self, wanted: Mapping[str, Tensor]) -> None:
        """Pulls rows of several tables at once, before the forward pass that uses them.

        Args:
            wanted: ids in any order and shape, by the path of a table's module or the name of its tensor.

        Raises:
            TaskError: if there is no such table.
            IndexError: if it has no such row.
        """
        ids: dict[str, list[Tensor]] = {}
        for name, some in wanted.items():
            if name not in self._known:
                raise TaskError(
                    f"`rows(batch)` names `{name}`, which is no table of the model",
                    where="rows(batch)",
                    fix=nearest(name, list(self._known))
                    if self._known
                    else "Tables are nn.Embedding(..., sparse=True) and verbund.Table",
                )
            ids.setdefault(self._known[name].name, []).append(some.reshape(-1))
        with torch.no_grad():
            unique = {name: _unique(torch.cat(some))[0] for name, some in ids.items()}
        self._pulled.fetch(unique)

    def gradients(self) -> dict[str, tuple[Tensor, Tensor]]:
        """After backward passes: of each table that entered the loss the rows, ascending, and the sums of their
        gradients."""
        found = {}
        for name, uses in self._uses.items():
            parts = [_gradient(use) for use in uses if use.leaf.grad is not None]
            if len(parts) == 1:
                found[name] = parts[0]
            elif parts:
                rows, places = _unique(torch.cat([rows for rows, _ in parts]))
                values = torch.cat([values for _, values in parts])
                found[name] = rows, values.new_zeros(len(rows), values.shape[1]).index_add_(0, places, values)
        return found

    def clear(self) -> None:
        """Forgets gradients and rows: the next step asks anew."""
        self._uses.clear()
        self._pulled.clear()

    def use(self, table: RemoteTable, ids: Tensor, padding: int | None) -> tuple[Tensor, Tensor, int | None]:
        """What a lookup computes with.

        Args:
            table: whose rows.
            ids: of any shape.
            padding: the row that gets no gradient.

        Returns:
            ids, table and padding row for torch's own functions, where the table is that of the rows used.

        Raises:
            IndexError: if the table has no such row.
        """
        if ids.is_meta or ids.dtype not in (torch.int32, torch.int64):  # of other types torch says what is wrong
            return ids, torch.empty(table.shape, dtype=table.dtype, device="meta"), padding
        rows, places = _unique(ids)
        leaf = self._pulled.values(table.name, rows).detach().to(ids.device)
        if padding is not None:
            padding = next(iter((rows == padding).nonzero().flatten().tolist()), None)
        if torch.is_grad_enabled() and table.trained:
            leaf.requires_grad_()
            self._uses.setdefault(table.name, []).append(_Use(rows, leaf, padding))
        return places, leaf, padding


def _unique(ids: Tensor) -> tuple[Tensor, Tensor]:
    """The ids there are, ascending, int64 in the processor's memory, and the place of each id among them."""
    rows, places = torch.unique(ids, return_inverse=True)
    return rows.cpu().long(), places


def _gradient(use: _Use) -> tuple[Tensor, Tensor]:
    assert use.leaf.grad is not None
    rows, values = use.rows, use.leaf.grad.cpu()
    if use.padding is not None:
        kept = torch.arange(len(rows)) != use.padding
        rows, values = rows[kept], values[kept]
    return rows, values


def _described(name: str, weight: Tensor) -> RemoteTable:
    first = born_as(weight)
    if first is None and weight.is_meta:
        raise InputError(
            f"`{name}` is given other values after it was made, but rows of a `Table` are as they are born",
            where="model()",
            fix="Leave tables out where the model is initialised, or use nn.Embedding(..., sparse=True)",
        )
    rows, width = weight.shape
    return RemoteTable(name, (rows, width), weight.dtype, first, weight.requires_grad)


def _refuse_other_uses(model: nn.Module, modules: Mapping[str, nn.Module], weights: Mapping[int, RemoteTable]) -> None:
    lookups = set(map(id, modules.values()))
    for path, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if id(parameter) in weights and id(module) not in lookups:
                raise InputError(
                    f"`{f'{path}.' if path else ''}{key}` is tied to the table `{weights[id(parameter)].name}`, and "
                    "needs all of its rows, which lie on parameter servers",
                    where="model()",
                    fix=f"Untie them, or {WHOLE}",
                )
