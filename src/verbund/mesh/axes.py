"""The mesh: how the work is divided inside islands, and which samples are whose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from verbund.job import AXES, Strategy


@dataclass(frozen=True)
class Mesh:
    """The sizes of the islands' axes and this process's place among them.

    Ranks count through the axes with `tensor` the fastest, then `shard`, `data`, `pipeline`, and through the islands
    the slowest: those that exchange most are neighbours.

    Args:
        rank: this process's number among all workers.
        data: replicas that share the samples.
        shard: workers that share the samples and hold a share of every parameter each.
        tensor: workers that compute a share of every operation on the same samples.
        pipeline: workers that compute one run of layers after the other on the same samples.
        islands: groups of workers that all these axes divide alike.
    """

    rank: int = 0
    data: int = 1
    shard: int = 1
    tensor: int = 1
    pipeline: int = 1
    islands: int = 1

    @staticmethod
    def of(strategy: Strategy, rank: int) -> Mesh:
        """The mesh of a strategy; axes that it does not name are 1."""
        return Mesh(rank, **{axis: strategy.mesh.get(axis, 1) for axis in AXES}, islands=strategy.islands)

    @property
    def world(self) -> int:
        """Workers in all."""
        return self.size(*_ORDER)

    @property
    def island(self) -> int:
        """The number of this worker's island."""
        return self.place("islands")

    @property
    def leads(self) -> bool:
        """Whether this worker is the first of its island."""
        return self.place(*AXES) == 0

    def size(self, *axes: str) -> int:
        """The product of some axes' sizes."""
        return math.prod(getattr(self, axis) for axis in axes)

    def place(self, *axes: str) -> int:
        """This worker's number along some axes together, the last one the fastest."""
        return self._place(self._coordinates(self.rank), axes)

    def at(self, rank: int) -> Mesh:
        """The same mesh as another process sees it."""
        return replace(self, rank=rank)

    def peers(self, *axes: str) -> list[int]:
        """The ranks that differ from this one along `axes` only, itself among them, in the order of `place`."""
        mine = self._coordinates(self.rank)
        fixed = [axis for axis in _ORDER if axis not in axes]
        found = []
        for rank in range(self.world):
            there = self._coordinates(rank)
            if all(there[axis] == mine[axis] for axis in fixed):
                found.append((self._place(there, axes), rank))
        return [rank for _, rank in sorted(found)]

    @property
    def batch_workers(self) -> int:
        """How many workers (or groups of them) share the samples of a global batch."""
        return self.islands * self.data * self.shard

    @property
    def batch_worker(self) -> int:
        """Which of them this one belongs to."""
        return self.place("islands", "data", "shard")

    @property
    def divides_model(self) -> bool:
        """Whether a worker holds less than the whole model."""
        return self.shard * self.tensor * self.pipeline > 1

    def _coordinates(self, rank: int) -> dict[str, int]:
        found = {}
        for axis in reversed(_ORDER):
            rank, found[axis] = divmod(rank, getattr(self, axis))
        return found

    def _place(self, coordinates: dict[str, int], axes: tuple[str, ...]) -> int:
        place = 0
        for axis in _ORDER:
            if axis in axes:
                place = place * int(getattr(self, axis)) + coordinates[axis]
        return place


_ORDER = ("islands", "pipeline", "data", "shard", "tensor")


@dataclass(frozen=True)
class Division:
    """How a global batch is divided over the axis `data` and into micro-batches.

    The global batch is cut into units of `unit` consecutive samples (the last may be shorter), each worker gets a run
    of units as even as possible, and computes them in micro-batches. With `unit` = 1 only sums are formed over
    samples and any division gives the same result; a model with batch statistics, or a task that couples samples,
    needs units of more, which are always computed together.

    Args:
        workers: the size of the axis.
        unit: samples that stay together.
        micro_batch: samples of one forward pass; 0: as `passes` says. Ignored where units are of more than one
            sample: there every unit is a forward pass of its own.
        passes: into how many forward passes a share is divided, if there are enough samples.
        weights: shares in proportion to these, a whole number of at least 1 for each worker; none, or too few units:
            shares as even as possible.
        least: units that each share has at least, where they go by weights.
    """

    workers: int
    unit: int = 1
    micro_batch: int = 0
    passes: int = 1
    weights: tuple[int, ...] = ()
    least: int = 1

    @staticmethod
    def passes_of(mesh: Mesh) -> int:
        """Into how many passes a share is divided where nobody says: in a pipeline so many that its stages have work at
        the same time."""
        return 4 * mesh.pipeline if mesh.pipeline > 1 else 1

    def share(self, size: int, worker: int) -> tuple[int, int]:
        """The half-open range of a global batch of `size` samples that `worker` computes; may be empty."""
        units = -(-size // self.unit)
        low, high = self._bounds(units, worker), self._bounds(units, worker + 1)
        return min(low * self.unit, size), min(high * self.unit, size)

    def _bounds(self, units: int, worker: int) -> int:
        """How many units the workers before `worker` have."""
        if not self.weights or units < self.workers * self.least:
            return units * worker // self.workers
        return _by_weight(units, self.weights, self.least)[worker]

    def micro_batches(self, size: int, worker: int) -> list[tuple[int, int]]:
        """The half-open ranges of the forward passes of `worker`, in order."""
        low, high = self.share(size, worker)
        step = self.unit if self.unit > 1 else self.micro_batch or max(-(-(high - low) // self.passes), 1)
        return [(start, min(start + step, high)) for start in range(low, high, step)]

    def passes_together(self, sizes: Sequence[int]) -> int:
        """How many forward passes the worker with the most has of any of some batches."""
        return max(len(self.micro_batches(size, worker)) for size in sizes for worker in range(self.workers))

    def in_passes(self, size: int, worker: int, count: int) -> list[tuple[int, int]]:
        """The ranges of the forward passes of `worker` where all make `count` of them at the same time: as even as
        possible, so that a worker with fewer samples has fewer in each; may be fewer than `count`."""
        low, high = self.share(size, worker)
        if self.unit > 1 or not self.weights:
            return self.micro_batches(size, worker)
        cuts = [low + (high - low) * number // count for number in range(count + 1)]
        return [(start, end) for start, end in pairwise(cuts) if start < end]


@lru_cache(maxsize=1024)
def _by_weight(units: int, weights: tuple[int, ...], least: int) -> tuple[int, ...]:
    """The bounds of shares in proportion to weights, to the nearest unit, of `least` or more; shape [workers + 1]."""
    total, workers = sum(weights), len(weights)
    bounds, sofar = [0], 0
    for worker, weight in enumerate(weights, 1):
        sofar += weight
        nearest = (2 * units * sofar + total) // (2 * total)
        bounds.append(min(max(nearest, bounds[-1] + least), units - (workers - worker) * least))
    return tuple(bounds)
