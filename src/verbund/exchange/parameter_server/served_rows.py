"""A worker's tables while servers have them: pulls of rows, and what a ticket has taught them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verbund.checkpoint.box import Box
from verbund.checkpoint.piece import dtype_name
from verbund.comm.collectives import Group
from verbund.exchange.parameter_server.client import Client
from verbund.exchange.parameter_server.plan import Block, Plan, cut
from verbund.exchange.parameter_server.push import Part
from verbund.exchange.parameter_server.remote import RemoteTables

_RUNS = 2
"""Blocks of a table per server: a push and a pull have a part for each that they touch."""


def blocks_of(remote: RemoteTables, servers: int) -> list[Block]:
    """The tables of a model as blocks: a few runs of rows each."""
    found = []
    for table in remote.tables:
        size = table.shape[0] * table.shape[1] * table.dtype.itemsize
        limit = max(1, -(-size // (_RUNS * servers if servers > 1 else 1)))
        box = Box.whole(table.shape)
        for block in cut(table.name, table.shape, dtype_name(table.dtype), box, limit, table.dtype.itemsize):
            found.append(Block(block.name, block.shape, block.dtype, block.offset, block.length, "rows", table.born))
    return found


class ServedRows:
    """Where the rows of a worker's model come from, and go to.

    Args:
        remote: the model's tables; rows come from here from now on.
        client: the line to the servers.
        group: the workers that share an island's samples: their gradients of a row are added up.
    """

    def __init__(self, remote: RemoteTables, client: Client, plan: Plan, group: Group) -> None:
        self._remote, self._client, self._group = remote, client, group
        self._blocks = [number for number, block in enumerate(plan.blocks) if block.kind == "rows"]
        self._trained = {table.name for table in remote.tables if table.trained}
        self._names = {number: plan.blocks[number].name for number in self._blocks}
        self._versions: dict[int, int] = {}
        self._taught: tuple[dict[str, tuple[Tensor, Tensor]], dict[int, int]] = {}, {}
        self.ticket = 0
        """For which rows are pulled."""
        self.least = 0
        """The version that they must have at least."""
        remote.rows = self

    def first(self, plan: Plan) -> Iterator[tuple[int, Tensor | None]]:
        """The first values of blocks of tables, by number; None of those whose rows are made when they are needed."""
        for number in self._blocks:
            block = plan.blocks[number]
            values = self._remote.first.get(block.name)
            if values is None:
                yield number, None
            else:
                yield number, values[block.offset[0] : block.offset[0] + block.length[0]].contiguous()
        self._remote.first.clear()

    def pull(self, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `pulled.Rows`."""
        found = self._client.pull_rows(wanted, self.ticket, self.least)
        for rows in found.values():
            for block, version in rows.versions.items():
                self._versions[block] = min(version, self._versions.get(block, version))
        return {name: rows.values for name, rows in found.items()}

    def begin(self, ticket: int, least: int) -> None:
        """A ticket begins, or an evaluation: rows are pulled anew."""
        self.ticket, self.least = ticket, least
        self._versions.clear()
        self._remote.clear()

    def add_up(self) -> None:
        """What the ticket has taught the island as a whole is added up; to be called by all of its workers."""
        gradients = {name: of for name, of in self._remote.gradients().items() if name in self._trained}
        self._taught = gradients, dict(self._versions)
        if self._group.world > 1:
            self._taught = self._gathered(*self._taught)

    def square(self) -> float:
        """The squared norm of what was added up."""
        return sum(float(torch.linalg.vector_norm(values).double()) ** 2 for _, values in self._taught[0].values())

    def parts(self, every: bool) -> list[Part]:
        """What was added up, as parts of a push.

        Args:
            every: name the blocks too of which no row was touched, where a ticket counts only with all of them.
        """
        gradients, versions = self._taught
        parts = []
        for name, (rows, values) in gradients.items():
            if len(rows):
                parts += self._client.tables.parts(name, rows, values, versions)
        if every:
            touched = {part.block for part in parts}
            parts += [Part(n, versions.get(n, 0), None) for n in self._blocks if n not in touched]
        return parts

    def _gathered(
        self, gradients: dict[str, tuple[Tensor, Tensor]], versions: dict[int, int]
    ) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[int, int]]:
        """The sums over the workers, added in their order, and the oldest version of each block."""
        arrays: dict[str, np.ndarray[Any, Any]] = {
            "versions": np.array(list(versions.items()), np.int64).reshape(-1, 2)
        }
        for name, (rows, values) in gradients.items():
            arrays[f"rows {name}"], arrays[f"values {name}"] = rows.numpy(), values.numpy()
        every = self._group.all_gather_arrays(arrays, "the gathering of rows")
        found = {}
        for name in sorted({key.partition(" ")[2] for own in every for key in own if key.startswith("rows ")}):
            having = [own for own in every if f"rows {name}" in own]
            rows = torch.cat([torch.from_numpy(own[f"rows {name}"]) for own in having])
            values = torch.cat([torch.from_numpy(own[f"values {name}"]) for own in having])
            unique, places = torch.unique(rows, return_inverse=True)
            found[name] = unique, values.new_zeros(len(unique), values.shape[1]).index_add_(0, places, values)
        oldest: dict[int, int] = {}
        for own in every:
            for block, version in own["versions"].tolist():
                oldest[block] = min(version, oldest.get(block, version))
        return found, oldest
