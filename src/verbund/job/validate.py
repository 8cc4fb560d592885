"""The section `validate`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from verbund.job.section import Names, Positive, Section


class Validate(Section):
    """Validation during and after training."""

    every: Literal["epoch", "end"] | Positive = "epoch"
    """Steps between two validations, `epoch`, or `end`."""
    batch: Positive = 256
    """Samples of one evaluation batch; its composition never depends on the workers."""
    metrics: Annotated[Names | None, Field(examples=[["accuracy"]])] = None
    """Names; default: what fits the objective."""
