"""Which samples of every ticket are whose: a pure function that all workers know alike."""

from __future__ import annotations

from verbund.data.hashing import key
from verbund.data.order import Order, Positions
from verbund.data.samples import Samples
from verbund.errors import InputError
from verbund.job import Job
from verbund.mesh.axes import Division, Mesh
from verbund.mesh.balance import Balance
from verbund.stage.lengths import Lengths


class Tickets:
    """The tickets of a training as an island sees them.

    Args:
        samples: what is trained on.
        job: global batch, seed, window, and whether islands share the samples.
        mesh: the islands, and which is this one.
        unit: samples that stay together.
        balance: how islands share each ticket; default: evenly.

    Raises:
        InputError: if an island would have no sample of its own.
    """

    def __init__(self, samples: Samples, job: Job, mesh: Mesh, unit: int = 1, balance: Balance | None = None) -> None:
        self._islands = Division(mesh.islands, unit)
        self._balance = balance
        self._island = mesh.island
        count, batch = len(samples), job.train.global_batch
        self.lengths = Lengths(job.train, -(-count // batch))
        self._shared: Order | None = None
        self._own: list[Order] = []
        if job.data.placement == "shared" or mesh.islands == 1:
            self._shared = Order(count, batch, job.seed, samples.block, job.data.window)
            return
        self._rows = [count * island // mesh.islands for island in range(mesh.islands + 1)]
        shares = [self._islands.share(batch, island) for island in range(mesh.islands)]
        for island, (low, high) in enumerate(shares):
            rows = self._rows[island + 1] - self._rows[island]
            if rows == 0 or low == high:
                raise InputError(
                    f"island {island} of {mesh.islands} has no sample of its own: there are {count} samples, and "
                    f"{batch} in a global batch",
                    where="data.placement",
                    fix="Use fewer islands, larger global batches or more data",
                )
            self._own.append(Order(rows, high - low, key(job.seed, island), samples.block, job.data.window))

    def sizes(self, ticket: int) -> tuple[int, ...]:
        """How many samples of a ticket each island has."""
        if self._shared is None:
            return tuple(order.size(ticket) for order in self._own)
        size, islands = self._shared.size(ticket), self._division(ticket)
        shares = (islands.share(size, island) for island in range(islands.workers))
        return tuple(high - low for low, high in shares)

    @property
    def whole(self) -> tuple[int, ...]:
        """The samples that each island has of a whole global batch, if all have even shares."""
        if self._shared is None:
            return tuple(order.size(0) for order in self._own)
        shares = (self._islands.share(self._shared.size(0), island) for island in range(self._islands.workers))
        return tuple(high - low for low, high in shares)

    def positions(self, ticket: int) -> Positions:
        """This island's samples of a ticket, int64, shape [sizes(ticket)[island]]; those of the ticket where the island
        has none, for passes in which it only takes part."""
        if self._shared is None:
            return self._own[self._island].positions(ticket) + self._rows[self._island]
        low, high = self._division(ticket).share(self._shared.size(ticket), self._island)
        positions = self._shared.positions(ticket)
        return positions[low:high] if low < high else positions

    def _division(self, ticket: int) -> Division:
        return self._islands if self._balance is None else self._balance.islands(ticket)
