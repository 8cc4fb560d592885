"""What workers tell each other of every step, told to the supervisor now and then."""

from __future__ import annotations

import time
from collections.abc import Sequence

from verbund.cluster.worker import Worker
from verbund.mesh.axes import Mesh
from verbund.mesh.own_seconds import TOLD

_SECONDS = 0.5


class Paces:
    """Adds up own seconds and samples, and mentions them as rows `[ranks, steps, samples, own seconds, of them data]`.

    Args:
        worker: the first of those who tell each other.
        mesh: theirs.
        joint: whether they are all islands' workers, or those of its own island.
        members: the number of each worker of the mesh, by its place.
    """

    def __init__(self, worker: Worker, mesh: Mesh, joint: bool, members: Sequence[int]) -> None:
        self._worker = worker
        axes = ("islands", "data", "shard") if joint else ("data", "shard")
        mine = range(mesh.world) if joint else mesh.peers("data", "shard", "tensor", "pipeline")
        self._ranks: list[list[int]] = [[] for _ in range(mesh.size(*axes))]
        for rank in mine:
            self._ranks[mesh.at(rank).place(*axes)].append(members[rank])
        self._speaks = mesh.rank == mine[0]
        self._begin()

    def _begin(self) -> None:
        self._since, self._steps = time.monotonic(), 0
        self._samples = [0] * len(self._ranks)
        self._seconds = [0.0] * (TOLD * len(self._ranks))

    def record(self, samples: Sequence[int], told: Sequence[float]) -> None:
        """Takes in a step.

        Args:
            samples: of each worker (of those with the same samples together).
            told: what they told; see `OwnSeconds.end`.
        """
        if not self._speaks:
            return
        self._steps += 1
        self._samples = [sofar + count for sofar, count in zip(self._samples, samples, strict=True)]
        self._seconds = [sofar + seconds for sofar, seconds in zip(self._seconds, told, strict=True)]
        if time.monotonic() - self._since < _SECONDS:
            return
        rows = [
            [ranks, self._steps, self._samples[at], *self._seconds[TOLD * at : TOLD * (at + 1)]]
            for at, ranks in enumerate(self._ranks)
        ]
        self._worker.mention("paces", rows=rows)
        self._begin()
