"""The section `strategy`."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from verbund.errors import nearest
from verbund.job.compression import CASTS, Compression
from verbund.job.exchange import Exchange
from verbund.job.section import Section
from verbund.job.stragglers import Stragglers

AXES = ("data", "shard", "tensor", "pipeline")


class Strategy(Section):
    """How the work is divided: a mesh inside an island, an exchange between islands."""

    mesh: Annotated[dict[str, int], Field(examples=[{"data": 2}])] = {}
    """Sizes of the axes `data` (replicas share the samples), `shard` (so do workers that hold a share of every
    parameter), `tensor` (workers share every large operation) and `pipeline` (workers share the layers)."""
    islands: int = 1
    """Groups of workers, each with a mesh of this size; they share the samples of every global batch."""
    exchange: Annotated[Exchange, Field(examples=["diloco", {"name": "diloco", "every": 50}])] = Exchange()
    """How islands combine what they learn."""
    zero: Literal[1, 2, 3] = 3
    """Axis `shard`: what is divided all the time: 1 optimiser states, 2 gradients too, 3 parameters too."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "interleaved_zero_bubble"] = "1f1b"
    """Axis `pipeline`: the order in which a stage computes micro-batches."""
    chunks: Annotated[int, Field(ge=1, le=64)] | None = None
    """Axis `pipeline`: stages per worker; default 1, or 2 for the interleaved schedules."""
    balance: Literal["cost", "memory"] = "cost"
    """Axis `pipeline`: stages of equal work, counted from what each layer computes, or of equal bytes."""
    compression: Annotated[Compression, Field(examples=[{"name": "top_k", "density": 0.01}])] = Compression()
    """Axis `data` (casts: `shard` too): what gradients are sent as. Results are no longer those of one process."""
    stragglers: Annotated[Stragglers, Field(examples=["rebalance", {"name": "rebalance", "every": 10}])] = Stragglers()
    """Axes `data` and `shard`, and islands that add up gradients in every step: what is done about slow workers."""

    @model_validator(mode="after")
    def _known(self) -> Strategy:
        problems = []
        for axis, size in self.mesh.items():
            if axis not in AXES:
                problems.append(f"`{axis}` is no axis of a mesh. {nearest(axis, AXES)}")
            elif size < 1:
                problems.append(f"axis `{axis}` has {size} workers; it needs at least 1")
        if self.islands < 1:
            problems.append(f"{self.islands} islands; at least 1 is needed")
        if self.mesh.get("shard", 1) > 1 and self.compression.name not in ("none", *CASTS):
            problems.append(
                f"compression `{self.compression.name}` does not work with the axis `shard`: every worker would have "
                "to keep what was left out of the whole gradient, which the axis is there to avoid. Use `fp16` or "
                "`bf16`, or the axis `data` alone"
            )
        if self.chunks is not None and self.chunks > 1 and not self.schedule.startswith("interleaved"):
            problems.append(
                f"`chunks` of {self.chunks} need a schedule `interleaved` or `interleaved_zero_bubble`, "
                f"not `{self.schedule}`"
            )
        if self.exchange.local and self.exchange.least(self.islands) > self.islands:
            problems.append(f"a `quorum` of {self.exchange.quorum} needs more than {self.islands} islands")
        problems += self._straggler_problems()
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def _straggler_problems(self) -> list[str]:
        if not self.stragglers.rebalances:
            return []
        problem = ""
        if self.exchange.served:
            problem = (
                "`stragglers` `rebalance` is for workers whose gradients are added up; with parameter servers use "
                '`consistency = "asynchronous"`, where a slow island takes fewer tickets, or `backup`'
            )
        elif self.exchange.federated:
            problem = (
                "`stragglers` `rebalance` is for workers whose gradients are added up; clients of a federation have "
                "samples of their own: leave it out"
            )
        elif self.exchange.local and self.islands > 1 and self.mesh.get("data", 1) * self.mesh.get("shard", 1) == 1:
            problem = (
                f"`stragglers` `rebalance` divides samples inside of an island, and islands of `{self.exchange.name}` "
                "have no axis `data` or `shard` here: give them one, or leave it out"
            )
        return [problem] if problem else []

    @property
    def axes(self) -> dict[str, int]:
        """The axes that divide something, with their sizes."""
        return {axis: self.mesh[axis] for axis in AXES if self.mesh.get(axis, 1) > 1}

    @property
    def stages_per_worker(self) -> int:
        """Pipeline stages of each worker."""
        return self.chunks or (2 if self.schedule.startswith("interleaved") else 1)

    @property
    def world(self) -> int:
        """The number of workers."""
        return math.prod(self.mesh.values()) * self.islands

    @property
    def inside(self) -> Strategy:
        """The strategy of one island by itself."""
        return self.model_copy(update={"islands": 1, "exchange": Exchange()})
