"""The key `strategy.exchange.statistics`: what a server asks of its clients' columns."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from verbund.job.section import Section


class ColumnStatistics(Section):
    """Count, mean, variance, histogram and, from it, quantiles of a column of numbers."""

    low: float = 0.0
    """Where the histogram begins."""
    high: float = 1.0
    """Where it ends; with noise, values beyond count as the nearer end."""
    bins: Annotated[int, Field(ge=1, le=1024)] = 20
    """Of the histogram, all of one width; what is below or above is counted besides."""

    @model_validator(mode="after")
    def _fits(self) -> ColumnStatistics:
        if not self.low < self.high:
            raise ValueError(f"`low` of {self.low:g} must be below `high`, {self.high:g}")
        return self
