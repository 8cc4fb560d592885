"""Rounds of secure aggregation in one process, in which anybody may drop out or cheat."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verbund.exchange.federated.secure import Client, ClientCheated, Identity, Round, Sent, Server, Sum, Terms
from verbund.exchange.federated.secure.fixed_point import as_words
from verbund.exchange.federated.secure.masks import Contribution, whole
from verbund.job import Secure

Tap = Callable[[str, Sent], Sent]
"""Gets a client's name and a message to or from it, and gives what arrives."""


def untouched(_: str, sent: Sent) -> Sent:
    return sent


@dataclass
class Federation:
    """Clients, enrolled at each other."""

    clients: int
    length: int = 50
    settings: dict[str, Any] = field(default_factory=dict)
    headroom: int = 0

    def __post_init__(self) -> None:
        self.names = [f"c{i:04}" for i in range(self.clients)]
        self.identities = {name: Identity.create() for name in self.names}
        self.roster = {name: identity.public for name, identity in self.identities.items()}
        self.terms = Terms("test", Secure.model_validate(self.settings), self.length, self.headroom)

    def round(self, number: int = 0) -> Round:
        return Round(self.terms, number, tuple(self.names))

    def client(self, name: str, contribution: Contribution, weight: int = 1, after: int = -1) -> Client:
        return Client(name, self.identities[name], self.roster, self.terms, contribution, weight, after)

    def vectors(self, seed: int = 0) -> dict[str, NDArray[np.int64]]:
        most = (1 << (self.terms.settings.bits - 1)) - 1
        random = np.random.default_rng(seed)
        return {name: random.integers(-most, most + 1, self.length) for name in self.names}


class Play:
    """One round. `lost[step]` are the clients that never send what that step asks of them."""

    def __init__(
        self,
        federation: Federation,
        vectors: Mapping[str, NDArray[np.int64]],
        weights: Mapping[str, int] | None = None,
        lost: Mapping[str, Collection[str]] | None = None,
        down: Tap = untouched,
        up: Tap = untouched,
        number: int = 0,
    ) -> None:
        self.server = Server(federation.round(number), federation.roster)
        self.weights = dict.fromkeys(federation.names, 1) | dict(weights or {})
        word = self.server.round.word
        self.clients = {
            name: federation.client(name, whole(as_words(vectors[name] * weight, word)), weight)
            for name, weight in self.weights.items()
        }
        self.vectors, self.lost, self.down, self.up = vectors, lost or {}, down, up
        self.due = {name: self.server.invite() for name in federation.names}
        self.traffic: dict[str, list[Sent]] = {name: [] for name in federation.names}

    def step(self) -> None:
        step = self.server.step
        assert step is not None
        gone = {name for steps in self.lost.values() for name in steps} if step == "reveal" else set()
        gone |= {name for s, names in self.lost.items() if s == step for name in names}
        for name, sent in self.due.items():
            arriving = self.down(name, sent)
            self.traffic[name].append(arriving)
            if name in gone:
                continue
            answer = self.up(name, self.clients[name].receive(arriving.message()))
            self.traffic[name].append(answer)
            with suppress(ClientCheated):  # the server knows the name
                self.server.receive(name, answer.message())
        self.due = self.server.advance()

    def run(self) -> Sum:
        while self.server.step is not None:
            self.step()
        assert self.server.result is not None
        return self.server.result

    def expected(self, survivors: Collection[str]) -> NDArray[np.int64]:
        return np.sum([self.vectors[name] * self.weights[name] for name in survivors], axis=0, dtype=np.int64)
