"""What compressing gradients came to, from a run's journals. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from verbund.observe.journal import ProcessJournal

HOW_RATIO = (
    "bytes that a worker sends for gradients by the size of what collectives or pushes were handed, without "
    "compression ÷ with it, over all steps, the warm-up among them"
)
HOW_ERROR = (
    "an estimate: the norm of what workers left out, taken as independent of each other, ÷ that of what was to be sent "
    "(with what was left out before); over every tenth step"
)


HOW_EXCHANGE = (
    "bytes that a worker sends for exchanges by the size of what collectives were handed; `ratio` is what as many "
    "exchanges without compression would have sent ÷ that"
)


def measure(journals: Sequence[ProcessJournal]) -> dict[str, Any] | None:
    """`compression` of a summary: of the method that was used last, over all generations that used it; None without
    any."""
    return _added([(j, j.compression) for j in journals if j.role == "worker" and j.compression], HOW_RATIO)


def measure_exchange(journals: Sequence[ProcessJournal]) -> dict[str, Any] | None:
    """`exchange` of a summary: of the exchange between islands that was used last; None where gradients are added up in
    every step. `exchanges` is how often everything was exchanged."""
    saying = [(j, j.exchange) for j in journals if j.role == "worker" and j.exchange]
    found = _added(saying, HOW_EXCHANGE)
    if found is None:
        return None
    compression = max(saying, key=lambda pair: pair[0].generation)[1].get("compression", "none")
    exchanges, seconds = found.pop("steps"), found.pop("seconds")
    return {**found, "compression": compression, "exchanges": exchanges, "seconds_compressing": seconds}


def _added(saying: Sequence[tuple[ProcessJournal, dict[str, Any]]], how: str) -> dict[str, Any] | None:
    if not saying:
        return None
    method = max(saying, key=lambda pair: pair[0].generation)[1]["method"]
    mine = [(j, c) for j, c in saying if c["method"] == method]

    def added(key: str) -> float:
        return float(sum(c[key] for _, c in mine))

    steps = {j.generation: int(c["steps"]) for j, c in mine}
    with_, without = added("bytes_with"), added("bytes_without")
    left_out, summed = added("left_out"), sum(c["summed"] / max(c["workers"], 1) for _, c in mine)
    whole = left_out + summed
    return {
        "method": method,
        "steps": sum(steps.values()),
        "bytes_without": int(without),
        "bytes_with": int(with_),
        "ratio": round(without / with_, 4) if with_ else None,
        "how": how,
        "seconds": round(added("seconds") / len(mine), 6),
        "relative_error": {
            "estimate": math.sqrt(left_out / whole) if whole > 0 else None,
            "how": HOW_ERROR if whole > 0 else "not measured",
        },
    }
