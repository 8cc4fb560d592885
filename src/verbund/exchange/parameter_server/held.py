"""One block as a server has it: values with the optimiser's state, version, and what has come of later steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from verbund.exchange.parameter_server.aggregation import Ticket
from verbund.exchange.parameter_server.history import History
from verbund.exchange.parameter_server.image import Image, Store, store_of, tensors_of
from verbund.exchange.parameter_server.ledger import Ledger
from verbund.exchange.parameter_server.plan import Block, Rule
from verbund.exchange.parameter_server.server_optimizer import ServerOptimizer
from verbund.exchange.parameter_server.tables import Table


@dataclass
class Held:
    """A block.

    Args:
        store: its values and the optimiser's state.
        version: see `Holdings.version`.
        ledger: of the shares that it has.
        tickets: synchronous: those that have not been taken.
        history: earlier values, for delay compensation.
        buffer: memory for the next gradient, if it is no table.
        norm: by which the last ticket was clipped, if tickets are.
    """

    store: Store
    version: int
    ledger: Ledger
    tickets: dict[int, Ticket] = field(default_factory=dict)
    history: History | None = None
    buffer: Tensor | None = None
    norm: float | None = None

    def image(self, block: int, copy: bool) -> Image:
        """All of it; see `Holdings.image`."""
        tensors = tensors_of(self.store)
        for number, ticket in self.tickets.items():
            tensors |= {f"tickets/{number}/{name}": tensor for name, tensor in ticket.tensors().items()}
        if self.history is not None:
            tensors |= {f"history/{name}": tensor for name, tensor in self.history.tensors().items()}
        fields: dict[str, Any] = {
            "version": self.version,
            "ledger": self.ledger.record(),
            "tickets": [[number, self.tickets[number].fields()] for number in sorted(self.tickets)],
            "history": None if self.history is None else self.history.fields(),
            "norm": self.norm,
            "lazy": isinstance(self.store, Table) and self.store.lazy,
        }
        return Image(block, fields, {name: tensor.clone() for name, tensor in tensors.items()} if copy else tensors)

    @staticmethod
    def of(image: Image, block: Block, rule: Rule, optimizer: ServerOptimizer) -> Held:
        """What `image` told of; its tensors become the block's."""
        fields = image.fields
        held = Held(store_of(block, image, optimizer), int(fields["version"]), Ledger.of(fields["ledger"], rule.shares))
        for ticket, record in fields["tickets"]:
            held.tickets[int(ticket)] = Ticket.of(record, image.part(f"tickets/{ticket}/"))
        if fields["history"] is not None:
            held.history = History.of(fields["history"], image.part("history/"))
        held.norm = fields["norm"]
        return held
