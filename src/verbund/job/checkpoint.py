"""The section `checkpoint`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from verbund.job.section import Positive, Section


class Checkpoint(Section):
    """What is kept on disk."""

    every: Literal["epoch", "end"] | Positive = "epoch"
    """Steps between two checkpoints, `epoch`, or `end`."""
    keep: Positive = 2
    """Checkpoints kept, the newest first; the best one (if a target or patience names a metric) is kept besides."""
    disk_budget_mb: Annotated[float, Field(gt=0)] | None = None
    """Older checkpoints are pruned until the rest fits; the newest always stays."""
    mirror: Literal["auto"] | Annotated[int, Field(ge=0)] = "auto"
    """Where the mesh divides the model: steps between two copies of what each worker holds in memory that outlives it,
    to which all go back if a worker is lost whose parts nobody else holds; 0: none. They take twice the memory of
    parameters and optimiser. `auto`: 10 where no axis `data` holds each part twice, else none."""
