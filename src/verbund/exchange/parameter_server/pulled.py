"""Rows of embedding tables that a worker has pulled: each once a step, and those of all tables in one request where
they are known before the forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from verbund.randomness.rows import born


class Rows(Protocol):
    """Where rows of tables come from."""

    def pull(self, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Rows of some tables, in one request.

        Args:
            wanted: of each table, by the name of its tensor, the rows: int64, ascending, each once.

        Returns:
            of each table their values, [rows, width], which are the caller's.
        """
        ...


@dataclass(frozen=True)
class RemoteTable:
    """A table that lies on servers.

    Args:
        name: the global name of its tensor; of tied tables the first.
        shape: of the whole tensor: rows and their width.
        dtype: of it.
        born: seed and scale of a table whose rows are made when they are first asked for.
        trained: whether it requires a gradient.
    """

    name: str
    shape: tuple[int, int]
    dtype: torch.dtype
    born: tuple[int, float] | None
    trained: bool

    def check(self, rows: Tensor) -> None:
        """Whether it has these rows, which are ascending.

        Raises:
            IndexError: naming the first that it does not have.
        """
        count = self.shape[0]
        if len(rows) and (int(rows[0]) < 0 or int(rows[-1]) >= count):
            wrong = int(rows[0]) if int(rows[0]) < 0 else int(rows[rows >= count][0])
            raise IndexError(f"index {wrong} is out of range for the table `{self.name}` of {count} rows")


class FirstRows:
    """Rows as they are before anything was learnt.

    Args:
        first: the values of tables that are not born.
    """

    def __init__(self, tables: Mapping[str, RemoteTable], first: Mapping[str, Tensor]) -> None:
        self._tables, self._first = tables, first

    def pull(self, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `Rows`."""
        return {name: self._of(self._tables[name], rows) for name, rows in wanted.items()}

    def _of(self, table: RemoteTable, rows: Tensor) -> Tensor:
        if table.born is None:
            return self._first[table.name][rows]
        seed, scale = table.born
        return born(seed, rows, table.shape[1], scale).to(table.dtype)


@dataclass(frozen=True)
class Held:
    """Some rows of a table, ascending, and their values."""

    rows: Tensor
    values: Tensor

    def missing(self, rows: Tensor) -> Tensor:
        """Those of `rows` that are not here."""
        if not len(self.rows):
            return rows
        places = torch.searchsorted(self.rows, rows).clamp_(max=len(self.rows) - 1)
        return rows[self.rows[places] != rows]

    def of(self, rows: Tensor) -> Tensor:
        """The values of rows that are all here."""
        return self.values if len(rows) == len(self.rows) else self.values[torch.searchsorted(self.rows, rows)]

    def joined(self, rows: Tensor, values: Tensor) -> Held:
        """With others that were not here."""
        if not len(self.rows):
            return Held(rows, values)
        both, order = torch.cat([self.rows, rows]).sort()
        return Held(both, torch.cat([self.values, values])[order])


class Pulled:
    """What is here of all tables.

    What a training step has pulled it uses to its end: so all of its micro-batches compute with the same rows. An
    evaluation keeps only what was fetched for its batch.

    Args:
        tables: by name.
        rows: where rows come from.
    """

    def __init__(self, tables: Mapping[str, RemoteTable], rows: Rows) -> None:
        self.rows = rows
        self._tables = tables
        self._held: dict[bool, dict[str, Held]] = {True: {}, False: {}}

    def fetch(self, wanted: Mapping[str, Tensor]) -> None:
        """Pulls rows, ascending, of several tables, and keeps them for the passes to come."""
        training = torch.is_grad_enabled()
        if not training:
            self._held[False].clear()
        self._held[training].update(self._complete(wanted, training))

    def values(self, name: str, rows: Tensor) -> Tensor:
        """The values of ascending rows of a table."""
        training = torch.is_grad_enabled()
        complete = self._complete({name: rows}, training)
        if training:
            self._held[True].update(complete)
        return complete[name].of(rows)

    def clear(self) -> None:
        """Forgets all."""
        for held in self._held.values():
            held.clear()

    def _complete(self, wanted: Mapping[str, Tensor], training: bool) -> dict[str, Held]:
        """What is held of these tables, with the rows that were still missing."""
        found = {}
        for name, rows in wanted.items():
            table = self._tables[name]
            table.check(rows)
            nothing = Held(rows[:0], torch.empty((0, table.shape[1]), dtype=table.dtype))
            found[name] = self._held[training].get(name, nothing)
        missing = {name: found[name].missing(rows) for name, rows in wanted.items()}
        missing = {name: rows for name, rows in missing.items() if len(rows)}
        if missing:
            # Whoever answers may keep what it is given, and what is made here in an evaluation no training could use.
            with torch.inference_mode(False), torch.no_grad():
                missing = {name: rows.clone() if rows.is_inference() else rows for name, rows in missing.items()}
                for name, values in self.rows.pull(missing).items():
                    found[name] = found[name].joined(missing[name], values)
        return found
