"""All that a server has of one block, as JSON values and tensors: for a replica, a snapshot, a beginning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from verbund.exchange.parameter_server.dense import Dense, Sum
from verbund.exchange.parameter_server.plan import Block
from verbund.exchange.parameter_server.server_optimizer import ServerOptimizer
from verbund.exchange.parameter_server.tables import Table

Store = Dense | Sum | Table
_STATE = "optimizer/"


@dataclass(frozen=True)
class Image:
    """All of a block.

    Args:
        block: its number.
        fields: JSON values.
        tensors: by name.
    """

    block: int
    fields: dict[str, Any]
    tensors: dict[str, Tensor]

    def part(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names begin so, by the rest of their names."""
        return {name.removeprefix(prefix): tensor for name, tensor in self.tensors.items() if name.startswith(prefix)}


def tensors_of(store: Store) -> dict[str, Tensor]:
    """A store's values and optimiser state: its own memory, but for tables, of which only the rows that there are."""
    if isinstance(store, Sum):
        return {"values": store.values}
    if isinstance(store, Dense):
        return {"values": store.values} | {_STATE + key: value for key, value in store.state().items()}
    rows = store.stepped.nonzero().view(-1)
    values = store.gather(rows) if store.lazy else store.all_rows
    return {"values": values, "rows": rows} | {_STATE + key: value for key, value in store.state(rows).items()}


def store_of(block: Block, image: Image, optimizer: ServerOptimizer) -> Store:
    """The store that `tensors_of` told of."""
    values, state = image.tensors["values"], image.part(_STATE)
    if block.kind == "sum":
        return Sum(block, values)
    if block.kind == "dense":
        return Dense(block, values, optimizer, state)
    rows = image.tensors["rows"]
    lazy = bool(image.fields["lazy"])
    table = Table(block, optimizer, None if lazy else values)
    table.put(rows, values if lazy else None, state)
    return table
