"""A push: what an island has learnt from one ticket, for the blocks of one server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Part:
    """The gradient of one block.

    Args:
        block: its number.
        base: the version of the block that the gradient was computed with.
        values: flat; of a table the rows' gradients one after the other; None: the loss did not depend on the block.
        rows: of a table, which rows of the whole table, int64, ascending, each once.
    """

    block: int
    base: int
    values: Tensor | None
    rows: Tensor | None = None


@dataclass(frozen=True)
class Push:
    """A contribution. Per block, values · scale are undivided sums, and weight is what all shares' sum is divided by.

    Args:
        client: the island.
        generation: of the island: a newer one fences the older.
        ticket: the number of the global batch.
        share: which part of the ticket this is; 0 where tickets are not divided.
        scale: see above.
        weight: see above.
        rate: factor on the optimiser's learning rates (the schedule).
        low: all tickets below are done everywhere: what is remembered of them may be forgotten.
        parts: by block.
    """

    client: int
    generation: int
    ticket: int
    share: int
    scale: float
    weight: float
    rate: float
    low: int
    parts: Sequence[Part]

    def fields(self) -> dict[str, Any]:
        """All but the tensors, as JSON values; see `arrays`."""
        parts = [
            [part.block, part.base, part.values is not None, None if part.rows is None else len(part.rows)]
            for part in self.parts
        ]
        return {
            "client": self.client,
            "generation": self.generation,
            "ticket": self.ticket,
            "share": self.share,
            "scale": self.scale,
            "weight": self.weight,
            "rate": self.rate,
            "low": self.low,
            "parts": parts,
        }

    def arrays(self) -> dict[str, Tensor]:
        """The tensors, one after the other: `values`, and `rows` where there are tables."""
        values = [part.values for part in self.parts if part.values is not None]
        rows = [part.rows for part in self.parts if part.rows is not None]
        found = {}
        if values:
            found["values"] = values[0] if len(values) == 1 else torch.cat(values)
        if rows:
            found["rows"] = rows[0] if len(rows) == 1 else torch.cat(rows)
        return found


@dataclass(frozen=True)
class Outcome:
    """What became of one part.

    Args:
        state: `applied`: the optimiser has stepped (or a sum was added to); `waiting`: kept until the other shares of
            the ticket are there; `known`: it had come before; `late`: its ticket went on without it.
        version: of the block, now.
        staleness: of an asynchronous step, or of a share: how many versions the block was ahead of the gradient's base
            when its step was taken; None where it is not known yet or was not counted again.
    """

    state: Literal["applied", "waiting", "known", "late"]
    version: int
    staleness: int | None
