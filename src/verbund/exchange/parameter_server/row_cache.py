"""Rows of tables that were pulled a few tickets ago, and are taken again: those that are in every batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class _Cached:
    rows: Tensor
    tickets: Tensor
    versions: Tensor
    values: Tensor


class RowCache:
    """Direct-mapped: a row has one place, and the newest that was pulled to it stays.

    Args:
        tickets: for how many a row may be taken again after it was pulled.
        limit: bytes that one table's cache may have.
    """

    def __init__(self, tickets: int, limit: int) -> None:
        self._tickets = tickets
        self._limit = limit
        self._tables: dict[str, _Cached] = {}
        self.hits = 0
        self.asked = 0

    def take(self, table: str, rows: Tensor, ticket: int, least: int, into: Tensor) -> tuple[Tensor, Tensor]:
        """Fills in the rows that are here.

        Args:
            table: its name.
            rows: which.
            ticket: for which they are needed.
            least: the version that they must have.
            into: [len(rows), width].

        Returns:
            A mask of those that are here, and the versions of all.
        """
        self.asked += len(rows)
        cached = self._tables.get(table)
        if cached is None:
            return torch.zeros(len(rows), dtype=torch.bool), torch.zeros(len(rows), dtype=torch.int64)
        places = rows % len(cached.rows)
        fresh = (cached.tickets[places] >= ticket - self._tickets) & (cached.versions[places] >= least)
        here = (cached.rows[places] == rows) & fresh
        found = places[here]
        into[here] = cached.values[found]
        self.hits += len(found)
        return here, cached.versions[places]

    def put(self, table: str, rows: Tensor, ticket: int, versions: Tensor, values: Tensor) -> None:
        """Keeps rows that were pulled for a ticket."""
        if not len(rows):
            return
        cached = self._tables.get(table)
        if cached is None:
            width = values.shape[1]
            count = max(1, self._limit // (width * values.element_size() + 24))
            cached = self._tables[table] = _Cached(
                torch.full((count,), -1, dtype=torch.int64),
                torch.zeros(count, dtype=torch.int64),
                torch.zeros(count, dtype=torch.int64),
                torch.empty((count, width), dtype=values.dtype),
            )
        places = rows % len(cached.rows)
        # Of several rows with one place, which of them stays must be the same in all columns.
        cached.rows[places] = rows
        stayed = cached.rows[places] == rows
        places = places[stayed]
        cached.tickets[places] = ticket
        cached.versions[places] = versions[stayed]
        cached.values[places] = values[stayed]
