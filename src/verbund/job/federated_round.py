"""The key `strategy.exchange.round`: how a federated server gathers clients and their updates."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field

from verbund.job.section import Positive, Section

Share = Annotated[float, Field(gt=0.0, le=1.0)]


class Round(Section):
    """How a server with real clients holds a round."""

    quorum: Positive | Share = 0.5
    """Updates, or their share of the cohort, without which a round does not count and begins anew."""
    over_selection: Annotated[float, Field(ge=1.0, le=10.0)] = 1.0
    """How many times more clients are asked than the cohort has; the first to answer count."""
    deadline: Annotated[float, Field(gt=0.0)] = 3600.0
    """Seconds after which a round ends with the updates that are there."""
    gather: Annotated[float, Field(gt=0.0)] = 600.0
    """Seconds to wait for all of the cohort to be there before a round begins with fewer."""
    lost_after: Annotated[float, Field(gt=0.0)] = 60.0
    """Seconds without a connection after which a client is no longer waited for in this round."""
    step_deadline: Annotated[float, Field(gt=0.0)] = 600.0
    """secure: seconds for each of the five exchanges that follow training; who has not answered by then has dropped
    out."""
    attempts: Positive = 3
    """How often one round is begun before the training fails."""
    labels: dict[str, str] = {}
    """Labels that clients must have been enrolled with to be asked, such as `{ region = "north" }`."""

    def quorum_of(self, cohort: int) -> int:
        """How many updates of a cohort of that size must be there."""
        return min(self.quorum, cohort) if isinstance(self.quorum, int) else max(math.ceil(self.quorum * cohort), 1)
