"""The clients of a simulation: a cohort's local training, one client after the other in one model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from verbund.exchange.federated.client_side import Memory
from verbund.exchange.federated.compressed import UpdateCompression
from verbund.exchange.federated.partition import Parts
from verbund.exchange.federated.update import Update
from verbund.stage.federated.local import Assignment, LocalTraining

Trained = tuple[Update, Memory]


class Clients(Protocol):
    """What trains clients."""

    def train(self, assignments: Sequence[Assignment], memories: Mapping[int, Memory]) -> Iterator[Trained]:
        """Their updates and what they keep, in the order of the assignments.

        Args:
            assignments: one a client.
            memories: what clients kept, by number; who is not in it kept nothing.
        """
        ...


class Compressing:
    """Clients whose updates come as a server makes them of compressed ones.

    Args:
        clients: that train.
        compression: of their updates.
    """

    def __init__(self, clients: Clients, compression: UpdateCompression) -> None:
        self._clients, self._compression = clients, compression

    def train(self, assignments: Sequence[Assignment], memories: Mapping[int, Memory]) -> Iterator[Trained]:
        """See `Clients.train`."""
        trained = self._clients.train(assignments, memories)
        for assignment, (update, kept) in zip(assignments, trained, strict=True):
            memory = memories.get(assignment.client, {})
            coded = self._compression.encode(update.difference, memory, assignment.client, assignment.round)
            yield replace(update, difference=coded.difference), {**kept, **coded.kept}


class Resident:
    """Clients that take turns in one resident model.

    Args:
        local: trains one.
        parts: whose samples are whose.
    """

    def __init__(self, local: LocalTraining, parts: Parts) -> None:
        self._local, self._parts = local, parts

    def train(self, assignments: Sequence[Assignment], memories: Mapping[int, Memory]) -> Iterator[Trained]:
        """See `Clients.train`."""
        for assignment in assignments:
            yield self._local.train(assignment, self._parts.of(assignment.client), memories.get(assignment.client, {}))
