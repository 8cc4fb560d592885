"""A reader: gives a model what servers have at the moment, and takes no part in its training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from verbund.checkpoint.box import Box
from verbund.checkpoint.piece import Piece, dtype_name
from verbund.errors import InputError
from verbund.exchange.parameter_server.client import Client
from verbund.exchange.parameter_server.plan import Plan
from verbund.exchange.parameter_server.remote import RemoteTables
from verbund.mesh.replica import Replica

_KINDS = ("parameters", "buffers")
_Looks = tuple[tuple[int, ...], str, tuple[int, float] | None]
"""Shape and dtype of a tensor, and how its rows are born."""


class Reader:
    """Where a model that others train comes from, however this process has it divided.

    Args:
        plan: of the training.
        client: a line to its servers.
    """

    def __init__(self, plan: Plan, client: Client) -> None:
        self._plan, self._client = plan, client
        self._blocks: dict[str, list[int]] = {}
        for number, block in enumerate(plan.blocks):
            if block.kind != "rows":
                self._blocks.setdefault(block.name, []).append(number)
        self._seen: set[int] = set()

    @property
    def versions(self) -> tuple[int, int]:
        """The oldest and the newest version of all that has been read."""
        return min(self._seen, default=0), max(self._seen, default=0)

    def take(self, replica: Replica, remote: RemoteTables) -> None:
        """Fills a model; rows of its tables are read when they are used.

        Raises:
            InputError: if another model is being trained.
        """
        self._check(replica, remote)
        remote.rows = self
        with torch.no_grad():
            self._fill([piece for kind in _KINDS for piece in replica.pieces(kind)])

    def pull(self, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `pulled.Rows`."""
        found = self._client.pull_rows(wanted)
        for rows in found.values():
            self._seen.update(rows.versions.values())
        return {name: rows.values for name, rows in found.items()}

    def _fill(self, pieces: Iterable[Piece]) -> None:
        places: dict[int, list[tuple[Box, Tensor]]] = {}
        for piece in pieces:
            for number in self._blocks.get(piece.name, ()):
                common = piece.box.overlap(self._plan.blocks[number].box)
                if common is not None:
                    values = piece.values[common.within(piece.box)] if common.offset else piece.values
                    places.setdefault(number, []).append((common, values))
        into: dict[int, Tensor] = {}
        aside: set[int] = set()
        for number, found in places.items():
            block, (common, values) = self._plan.blocks[number], found[0]
            if len(found) == 1 and common == block.box and values.is_contiguous():
                into[number] = values.view(-1)
            else:
                into[number] = torch.empty(block.count, dtype=values.dtype)
                aside.add(number)
        self._seen.update(self._client.pull(into).values())
        for number in aside:
            block = self._plan.blocks[number]
            for common, values in places[number]:
                whole = into[number].view(block.length)
                values.copy_(whole[common.within(block.box)] if common.offset else whole)

    def _check(self, replica: Replica, remote: RemoteTables) -> None:
        """Compares the model with the one that is trained, tensor by tensor; each may be cut in its own way."""
        there: dict[str, _Looks] = {b.name: (b.shape, b.dtype, b.born) for b in self._plan.blocks}
        sums = {block.name for block in self._plan.blocks if block.kind == "sum"}
        trained = {held.name for held in replica.divided.trained if held.primary}
        pieces = [piece for kind in _KINDS for piece in replica.pieces(kind)]
        here: dict[str, _Looks] = {p.name: (p.shape, dtype_name(p.dtype), None) for p in pieces}
        here |= {table.name: (table.shape, dtype_name(table.dtype), table.born) for table in remote.tables}
        parameters = replica.state.all_names("parameters") | set(remote.names)
        known = parameters | (sums & replica.state.all_names("buffers"))
        problems = [f"`{name}` is trained there and not in it" for name in sorted(there.keys() - known)]
        problems += [f"`{name}` is in it and not trained there" for name in sorted(trained - there.keys())]
        for name in sorted(here.keys() & there.keys()):
            if here[name] != there[name]:
                (shape, dtype, born), (other, kind, seed) = here[name], there[name]
                how = f"{dtype} {list(shape)}, there {kind} {list(other)}"
                unlike = how if (shape, dtype) != (other, kind) else f"born as {born}, there as {seed}"
                problems.append(f"`{name}` is {unlike}")
        if problems:
            raise InputError(
                f"the model is not the one that is being trained: {problems[0]}"
                + (f", and {len(problems) - 1} more" if len(problems) > 1 else ""),
                where=str(replica.task.file),
                fix="The task file has changed since training began; the run's folder `task` has what it was",
            )
