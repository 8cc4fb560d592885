"""The section `observe`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from verbund.job.section import Section


class Observe(Section):
    """What is recorded."""

    journal_mb: Annotated[float, Field(gt=0)] = 64.0
    """Upper bound of one process's journal; beyond it, spans are thinned and the report says so."""
    tensorboard: bool = False
    """Write TensorBoard event files to `tensorboard/` (extra `tensorboard`)."""
