"""Rounds of a simulation that wait for nobody: clients start whenever one is done, and the server takes a step for
every K updates, however old the parameters are that these began from (`fedbuff`)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

from torch import Tensor

from verbund.checkpoint.piece import Piece
from verbund.checkpoint.read import Checkpoint
from verbund.data.hashing import key
from verbund.exchange.federated.cohort import drawn
from verbund.exchange.federated.fedbuff import FedBuff
from verbund.exchange.federated.update import Update
from verbund.stage.federated.clients import Trained
from verbund.stage.federated.local import Assignment
from verbund.stage.federated.rounds import Round, Rounds

_SALT = 0xA51C
_FLIGHT = "flight/"


@dataclass
class _Start:
    """A client that was sent off.

    Args:
        number: of the start, which decides how long it takes.
        client: which one.
        version: the server steps that its parameters had seen.
        arrives: when its update does, in simulated time.
        trained: what it then brings; None: it is still to be computed.
    """

    number: int
    client: int
    version: int
    arrives: float
    trained: Trained | None = None


class AsynchronousRounds(Rounds):
    """A cohort's number of clients are under way at any time; how long each takes is its number of samples times half
    of a normal distribution (Nguyen et al. 2022, section 6), a function of the seed."""

    def _begin(self) -> None:
        self._flight: list[_Start] = []
        self._clock = 0.0
        self._starts = 0

    def play(self, number: int, flag: float) -> Round:
        """The next K updates arrive, others start in their clients' places, and the server takes its step."""
        server = self._server
        assert isinstance(server.rule, FedBuff)
        fresh: list[_Start] = []
        arrived: list[_Start] = []
        while len(self._flight) < self._size:
            self._send(number, fresh, arrived)
        for place in range(self._buffer):
            first = min(self._flight, key=lambda start: (start.arrives, start.number))
            self._flight.remove(first)
            self._clock = first.arrives
            arrived.append(first)
            if place < self._buffer - 1:
                self._send(number, fresh, arrived)
        work = [Assignment(s.client, number, number, server.parameters) for s in fresh]
        largest = 0.0
        results: list[Trained] = []
        for trained, flags in self._trained(work, flag):
            largest = max(largest, flags)
            results += trained
        for start, result in zip(fresh, results, strict=True):
            start.trained = _own(result)
        brought = [start.trained for start in arrived if start.trained is not None]
        staleness = [server.rule.staleness(update) for update, _ in brought]
        played = self.step(number, [start.client for start in arrived], iter([(brought, largest)]))
        played.staleness = staleness
        return played

    def _send(self, version: int, fresh: list[_Start], arrived: list[_Start]) -> None:
        """Sends a client off that is not under way, and has not been in this step if there are others."""
        busy = {start.client for start in self._flight}
        recent = busy | {start.client for start in (*fresh, *arrived)}
        taken = recent if len(recent) < self._parts.clients else busy
        client = drawn(self._seed, self._starts, self._parts.clients, taken)
        uniform = (key(self._seed, _SALT, self._starts, 1) + 0.5) / 2**64
        long = NormalDist().inv_cdf(0.5 + 0.5 * min(max(uniform, 1e-9), 1 - 1e-9)) * int(self._parts.sizes[client])
        start = _Start(self._starts, client, version, self._clock + long)
        self._starts += 1
        self._flight.append(start)
        fresh.append(start)

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def record(self) -> dict[str, Any]:
        """What `load` needs besides tensors."""
        flight = []
        for start in self._flight:
            assert start.trained is not None
            update, _ = start.trained
            loss, weight = update.metrics["loss"]
            numbers = [start.number, start.client, start.version, update.local_steps]
            flight.append([*numbers, start.arrives, update.weight, loss if math.isfinite(loss) else None, weight])
        return {"clock": self._clock, "starts": self._starts, "flight": flight}

    def pieces(self) -> Iterator[Piece]:
        """The updates that are under way."""
        for start in self._flight:
            assert start.trained is not None
            for name, values in start.trained[0].difference.items():
                yield Piece.whole("exchange", f"{_FLIGHT}{start.number}/{name}", values)

    def load(self, checkpoint: Checkpoint) -> list[str]:
        """See `Rounds.load`."""
        record = checkpoint.state.get("exchange") or {}
        known = record.get("flight")
        if known is None:
            return []
        if record.get("parts") != self._parts.digest:
            return []  # which is told already
        if len(known) > self._size:
            return ["Fewer clients are under way at a time than before: what they had trained was dropped"]
        self._clock, self._starts = float(record["clock"]), int(record["starts"])
        tensors: dict[int, dict[str, Tensor]] = {}
        for name in checkpoint.names("exchange"):
            if name.startswith(_FLIGHT):
                number, _, parameter = name.removeprefix(_FLIGHT).partition("/")
                tensors.setdefault(int(number), {})[parameter] = checkpoint.read("exchange", name)
        for number, client, version, steps, arrives, samples, loss, weight in known:
            metrics = {"loss": (math.nan if loss is None else loss, weight)}
            update = Update(tensors[number], samples, version, steps, {}, metrics)
            self._flight.append(_Start(number, client, version, arrives, (update, {})))
        return []


def _own(trained: Trained) -> Trained:
    """With tensors of its own: those of clients that trained together are parts of one, which would be kept whole."""
    update, memory = trained
    return replace(update, difference={n: v.clone() for n, v in update.difference.items()}), memory
