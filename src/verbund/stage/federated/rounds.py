"""One round of a simulation: the cohort trains, its updates are checked and aggregated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from verbund.checkpoint.piece import Piece
from verbund.checkpoint.read import Checkpoint
from verbund.comm.collectives import Group
from verbund.errors import RunFailed
from verbund.exchange.federated.cohort import joined, sampled
from verbund.exchange.federated.partition import Parts
from verbund.exchange.federated.rule import SumRule, Sums
from verbund.exchange.federated.screening import Refused, norm
from verbund.exchange.federated.update import Update
from verbund.job import Job
from verbund.job.federated import too_few
from verbund.stage.federated.clients import Clients, Trained
from verbund.stage.federated.gathering import gather
from verbund.stage.federated.local import Assignment
from verbund.stage.federated.simulated_server import SimulatedServer

_CHUNK_BYTES = 256 << 20
"""Of the updates that are there at a time."""
_LISTED = 1000
"""Clients of a round that the journal lists; of more only how many they were."""


@dataclass
class Round:
    """What came of a round.

    Args:
        cohort: the clients that trained.
        refused: by client, why its update was not used.
        loss: the clients' losses over their local steps, and what it is to be divided by.
        samples: of the updates that were used.
        norms: of their differences.
        weights: that they had.
        agreement: between 0 and 1: the norm of the mean difference over the mean of the norms, which is the mean cosine
            between an update and the mean, weighted by the updates' norms.
        flag: the largest of the workers' reasons to stop.
        version: the server steps that the parameters had seen.
        steps: local steps of all.
    """

    cohort: list[int]
    refused: dict[int, str] = field(default_factory=dict)
    loss: float = 0.0
    weight: float = 0.0
    samples: float = 0.0
    norms: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    agreement: float | None = None
    flag: float = 0.0
    steps: int = 0

    def record(self, number: int, down: int, up: int) -> dict[str, Any]:
        """As JSON values, for the journal.

        Args:
            number: of the round.
            down: bytes that one client would receive.
            up: bytes that one client would send.
        """
        listed = len(self.cohort) <= _LISTED
        return {
            "round": number,
            "clients": len(self.cohort),
            "cohort": self.cohort if listed else None,
            "weights": self.weights if listed else None,
            "refused": {str(client): reason for client, reason in list(self.refused.items())[:_LISTED]},
            "loss": self.loss / self.weight if self.weight else None,
            "local_steps": self.steps,
            "norm": {
                "mean": sum(self.norms) / len(self.norms) if self.norms else None,
                "max": max(self.norms, default=None),
            },
            "agreement": self.agreement,
            "staleness": max(self.staleness, default=0),
            "bytes": {"down": down * len(self.cohort), "up": up * len(self.cohort)},
        }


class Rounds:
    """What plays rounds.

    Args:
        job: the seed, and how many clients train in a round.
        server: its state.
        clients: what trains.
        parts: whose samples are whose.
        group: the workers that share a cohort.
    """

    def __init__(self, job: Job, server: SimulatedServer, clients: Clients, parts: Parts, group: Group) -> None:
        self._server, self._clients, self._parts, self._group = server, clients, parts, group
        self._seed, self._size = job.seed, job.strategy.exchange.cohort_size(parts.clients)
        self._rule = job.strategy.exchange.rule
        self._buffer = self._rule.buffer or self._size
        self.down = _bytes(server.parameters) + _bytes(dict(server.rule.told()))
        """Bytes that a client would receive."""
        self.up = self.down
        """Bytes that a client would send: as much, whatever the rule, unless updates are compressed."""
        if server.compression is not None:
            self.up = server.compression.bytes_of(server.parameters)
        self._chunk = max(_CHUNK_BYTES // max(self.down, 1), group.world)
        self._begin()

    def _begin(self) -> None:
        """What a kind of rounds has to keep."""

    def cohort(self, number: int) -> list[int]:
        """The clients of a round: a function of the seed; none whose privacy budget is spent."""
        protection, clients = self._server.protection, self._parts.clients
        if protection is not None and protection.rate is not None:
            return joined(self._seed, number, clients, protection.rate)
        drawn, accounts = sampled(self._seed, number, clients, self._size), self._server.accounts
        return drawn if accounts is None else [client for client in drawn if accounts.affords(client)]

    def affordable(self, number: int) -> bool:
        """Whether the privacy budget, if there is one, is enough for a round."""
        protection, cohort = self._server.protection, self.cohort(number)
        if self._server.accounts is not None and (not cohort or too_few(self._rule, len(cohort))):
            return False
        return protection is None or protection.affords(cohort)

    def play(self, number: int, flag: float) -> Round:
        """All clients of a cohort train, and the server takes its step.

        Args:
            number: of the round.
            flag: this worker's reason to stop after this round, or 0.

        Raises:
            RunFailed: if no update could be used.
        """
        cohort = self.cohort(number)
        told = dict(self._server.rule.told())
        if self._server.accounts is not None:
            self._server.accounts.spend(cohort)
        assignments = [Assignment(client, number, number, self._server.parameters, told) for client in cohort]
        return self.step(number, cohort, self._trained(assignments, flag))

    def record(self) -> dict[str, Any]:
        """What `load` needs besides tensors."""
        return {}

    def pieces(self) -> Iterator[Piece]:
        """What is kept between rounds, for a checkpoint."""
        return iter(())

    def load(self, checkpoint: Checkpoint) -> list[str]:
        """Takes up what a checkpoint has.

        Returns:
            what had to be dropped, in sentences.
        """
        if (checkpoint.state.get("exchange") or {}).get("flight"):
            return ["Rounds were asynchronous: what clients under way had trained was dropped"]
        return []

    def _trained(self, assignments: Sequence[Assignment], flag: float) -> Iterator[tuple[list[Trained], float]]:
        """The updates of all, in order, chunk by chunk; each with the largest flag."""
        world, rank = self._group.world, self._group.rank
        for low in range(0, len(assignments), self._chunk):
            chunk = assignments[low : low + self._chunk]
            mine = chunk[len(chunk) * rank // world : len(chunk) * (rank + 1) // world]
            yield gather(list(self._clients.train(mine, self._server.memories)), flag, self._group)

    def step(self, number: int, cohort: list[int], chunks: Iterator[tuple[list[Trained], float]]) -> Round:
        """The server's step with what clients have trained.

        Args:
            number: of the round.
            cohort: the clients, in order.
            chunks: their updates in that order, with the workers' largest flag.

        Raises:
            RunFailed: if no update could be used.
        """
        server, round_ = self._server, Round(cohort)
        rule, screening = server.rule, server.screening
        summed = Sums() if isinstance(rule, SumRule) and not screening.compares else None
        protected = server.protection.begin(number, cohort) if server.protection is not None else None
        accepted: list[Update] = []
        kept, place = {}, 0
        for trained, flag in chunks:
            round_.flag = max(round_.flag, flag)
            for update, memory in trained:
                client = cohort[place]
                place += 1
                try:
                    usable, length = screening.measured(update)
                except Refused as refused:
                    round_.refused[client] = str(refused)
                    continue
                self._count(round_, update, usable, length)
                kept[client] = memory
                if protected is not None:
                    assert isinstance(rule, SumRule)
                    protected.add(client, rule.contribution(usable), usable.weight)
                elif summed is not None:
                    assert isinstance(rule, SumRule)
                    summed.add(rule.contribution(usable), usable.weight)
                else:
                    accepted.append(usable)
        used = [client for client in cohort if client not in round_.refused]
        for where, reason in screening.outliers(round_.norms).items():
            round_.refused[used[where]] = reason
            kept.pop(used[where])
        accepted = [u for client, u in zip(used, accepted, strict=False) if client not in round_.refused]
        if cohort and len(round_.refused) == len(cohort):
            client, reason = next(iter(round_.refused.items()))
            raise RunFailed(
                f"no update of {len(cohort)} could be used; that of client {client}: {reason}",
                where="strategy.exchange.rule",
                fix="Lower `train.optimizer.lr`, add `train.clip_norm`, or widen `refuse_beyond`",
            )
        before = server.parameters
        if protected is not None:
            summed = protected.close()
        if summed is not None:
            assert isinstance(rule, SumRule)
            server.parameters = rule.apply(before, summed)
            mean = {name: summed.mean(name) for name in before}
        else:
            server.parameters = rule.step(before, accepted)
            mean = {name: server.parameters[name] - before[name] for name in before}
        server.memories.update({client: memory for client, memory in kept.items() if memory})
        shared = sum(w * n for w, n in zip(round_.weights, round_.norms, strict=True))
        typical = shared / sum(round_.weights) if round_.weights else 0.0
        round_.agreement = min(norm(mean) / typical, 1.0) if typical else None
        return round_

    def _count(self, round_: Round, update: Update, usable: Update, length: float) -> None:
        total, weight = update.metrics["loss"]
        round_.loss, round_.weight = round_.loss + total, round_.weight + weight
        round_.samples += update.weight
        round_.norms.append(length)
        round_.weights.append(usable.weight)
        round_.steps += update.local_steps


def _bytes(tensors: dict[str, Tensor]) -> int:
    return sum(values.nbytes for values in tensors.values())
