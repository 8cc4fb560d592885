"""Which layers make up which stage, so that the slowest stage is as fast as it can be. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate


def balance(costs: Sequence[float], stages: int, fixed_first: float = 0.0, fixed_last: float = 0.0) -> list[int]:
    """Cuts consecutive layers into stages so that the largest cost of a stage is the least possible.

    Of several such cuts it takes one whose last stages have as few layers as can be: what is not known of the costs
    (the loss, the metrics) comes on top of the last stage.

    Args:
        costs: of each layer, in any unit; finite and not negative.
        stages: how many; each gets at least one layer.
        fixed_first, fixed_last: what the first and the last stage cost beyond their layers.

    Returns:
        the index of each stage's first layer.

    Raises:
        ValueError: if there are more stages than layers, no stages, or costs that are negative or not finite.
    """
    if stages < 1:
        raise ValueError(f"{stages} stages cannot be")
    if stages > len(costs):
        raise ValueError(f"{stages} stages need as many layers, and there are {len(costs)}")
    if not all(math.isfinite(cost) and cost >= 0 for cost in (*costs, fixed_first, fixed_last)):
        raise ValueError("costs have to be finite and not negative")
    sums = [0.0, *accumulate(costs)]

    def cost(begin: int, end: int, stage: int) -> float:
        fixed = (fixed_first if stage == 0 else 0.0) + (fixed_last if stage == stages - 1 else 0.0)
        return sums[end] - sums[begin] + fixed

    # best[end]: the least largest cost of the stages so far, if they have the layers before `end`.
    best = [cost(0, end, 0) if end else math.inf for end in range(len(costs) + 1)]
    tables = [best]
    for stage in range(1, stages):
        best = [
            min((max(best[begin], cost(begin, end, stage)) for begin in range(stage, end)), default=math.inf)
            for end in range(len(costs) + 1)
        ]
        tables.append(best)
    # From behind: each stage as few layers as leave the rest within the optimum.
    least, end = best[-1], len(costs)
    starts = []
    for stage in range(stages - 1, 0, -1):
        fits = (b for b in range(stage, end) if max(tables[stage - 1][b], cost(b, end, stage)) <= least)
        end = max(fits)
        starts.append(end)
    return [0, *reversed(starts)]
