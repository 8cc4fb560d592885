"""The mesh: how the work is divided inside an island, and which samples are whose."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mesh:
    """The sizes of an island's axes and this process's place among them."""

    data: int
    rank: int

    @property
    def world(self) -> int:
        return self.data


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
        micro_batch: samples of one forward pass; 0: all of the worker's share. Ignored where units are of more
            than one sample: there every unit is a forward pass of its own.
    """

    workers: int
    unit: int = 1
    micro_batch: int = 0

    def share(self, size: int, worker: int) -> tuple[int, int]:
        """The half-open range of a global batch of `size` samples that `worker` computes; may be empty."""
        units = -(-size // self.unit)
        low = units * worker // self.workers * self.unit
        high = units * (worker + 1) // self.workers * self.unit
        return min(low, size), min(high, size)

    def micro_batches(self, size: int, worker: int) -> list[tuple[int, int]]:
        """The half-open ranges of the forward passes of `worker`, in order."""
        low, high = self.share(size, worker)
        step = self.unit if self.unit > 1 else self.micro_batch or max(high - low, 1)
        return [(start, min(start + step, high)) for start in range(low, high, step)]
