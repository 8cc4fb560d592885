"""A federation in this process: a server, clients, and samples that lie in arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verbund import task as tasks
from verbund.data.samples import Ids, Rows, Samples, Source
from verbund.exchange.federated.partition import Parts
from verbund.job import Job
from verbund.mesh.axes import Mesh
from verbund.mesh.groups import Groups
from verbund.mesh.replica import Replica
from verbund.stage.federated.asynchronous import AsynchronousRounds
from verbund.stage.federated.clients import Clients, Resident
from verbund.stage.federated.local import LocalTraining
from verbund.stage.federated.parts import parts_of
from verbund.stage.federated.rounds import Round, Rounds
from verbund.stage.federated.simulated_server import SimulatedServer


class Arrays(Source):
    """Samples in memory."""

    def __init__(self, **columns: np.ndarray[Any, Any]) -> None:
        self._columns = columns
        self.size = len(next(iter(columns.values())))

    def rows(self, ids: Ids, ticket: int | None = None) -> Rows:
        return {name: values[ids] for name, values in self._columns.items()}


@dataclass
class Federation:
    job: Job
    local: LocalTraining
    parts: Parts
    server: SimulatedServer
    rounds: Rounds

    def play(self, count: int) -> list[Round]:
        """So many rounds from the first one."""
        return [self.rounds.play(number, 0.0) for number in range(count)]


def federation(
    folder: Path,
    task: str,
    exchange: dict[str, Any],
    train: dict[str, Any],
    clients_of: Callable[[LocalTraining, Parts], Clients] = Resident,
    **columns: np.ndarray[Any, Any],
) -> Federation:
    """A federation over columns `x` and `y`, among others."""
    (folder / "task.py").write_text(task)
    raw = {
        "task": "task.py",
        "data": {"train": "none.npz", "input": "x", "target": "y"},
        "train": {"objective": "cross_entropy", "steps": 5, "optimizer": {"name": "sgd", "lr": 0.1}, **train},
        "strategy": {"exchange": {"name": "federated", **exchange}},
    }
    job = Job.build(raw, {}, source="job.toml", folder=folder)
    samples = Samples(Arrays(**columns))
    replica = Replica(tasks.load(job, list(columns)), job, Mesh(), Groups.alone(torch.device("cpu")))
    local = LocalTraining(replica, job, samples, None, job.train.steps)
    parts = parts_of(job, samples, None)
    server = SimulatedServer(job, local, parts)
    kind = AsynchronousRounds if job.strategy.exchange.asynchronous(parts.clients) else Rounds
    rounds = kind(job, server, clients_of(local, parts), parts, replica.groups.island)
    return Federation(job, local, parts, server, rounds)
