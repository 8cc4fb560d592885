"""What compressing gradients came to, from a run's journals. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from verbund.observe.journal import ProcessJournal

HOW_RATIO = (
    "bytes that a worker sends for gradients by the size of what collectives were handed, without compression ÷ with "
    "it, over all steps, the warm-up among them"
)
HOW_ERROR = (
    "an estimate: the norm of what workers left out, taken as independent of each other, ÷ that of what was to be sent "
    "(gradients and what was left out before); over every tenth step"
)


def measure(journals: Sequence[ProcessJournal]) -> dict[str, Any] | None:
    """`compression` of a summary: of the method that was used last, over all generations that used it; None without
    any."""
    saying = [j for j in journals if j.role == "worker" and j.compression]
    if not saying:
        return None
    method = max(saying, key=lambda j: j.generation).compression or {}
    mine = [(j, c) for j in saying if (c := j.compression) and c["method"] == method["method"]]

    def added(key: str) -> float:
        return float(sum(c[key] for _, c in mine))

    steps = {j.generation: int(c["steps"]) for j, c in mine}
    with_, without = added("bytes_with"), added("bytes_without")
    left_out, summed = added("left_out"), sum(c["summed"] / max(c["workers"], 1) for _, c in mine)
    whole = left_out + summed
    return {
        "method": method["method"],
        "steps": sum(steps.values()),
        "bytes_without": int(without),
        "bytes_with": int(with_),
        "ratio": round(without / with_, 4) if with_ else None,
        "how": HOW_RATIO,
        "seconds": round(added("seconds") / len(mine), 6),
        "relative_error": {
            "estimate": math.sqrt(left_out / whole) if whole > 0 else None,
            "how": HOW_ERROR if whole > 0 else "not measured",
        },
    }
