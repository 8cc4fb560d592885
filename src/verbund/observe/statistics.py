"""What clients have told of their columns, put together, and how far their data differ. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from verbund.observe.journal import ProcessJournal

_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


def measure(journals: Sequence[ProcessJournal], settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """`statistics` of a summary; None if none were asked.

    Of each column over all clients that have told it: `count`, `mean`, `deviation` (of the population), `quantiles` (as
    far as the width of a bin tells), `bins` with `low` and `high`; and of each client `count`, `mean`, `deviation`, and
    `distance`: half of the sum of the differences between its shares of the bins and those of all (the total variation
    distance, from 0 to 1). `declined` has why clients have told nothing; `noise` whether some have added noise.
    """
    asked = ((settings.get("strategy") or {}).get("exchange") or {}).get("statistics") or {}
    events = [event for journal in journals for event in journal.events if event["name"] == "statistics"]
    if not asked or not events:
        return None
    answers = {str(event["client"]): event["answer"] for event in events}
    told = {name: each["columns"] for name, each in sorted(answers.items()) if "columns" in each}
    columns = {}
    for name, column in asked.items():
        mine = {client: each[name] for client, each in told.items() if each.get(name) is not None}
        columns[name] = combined(mine, float(column["low"]), float(column["high"])) if mine else None
    return {
        "columns": columns,
        "declined": {name: each["declined"] for name, each in sorted(answers.items()) if "declined" in each},
        "noise": any(each.get("noise") is not None for each in answers.values()),
    }


def combined(told: Mapping[str, Mapping[str, Any]], low: float, high: float) -> dict[str, Any]:
    """A column over clients.

    Args:
        told: by client, its sums; see `exchange.federated.statistics`.
        low, high: of the histogram.
    """
    middle = (low + high) / 2.0
    every = {key: math.fsum(each[key] for each in told.values()) for key in ("count", "sum", "squares")}
    bins = [math.fsum(many or 0.0 for many in each) for each in zip(*(c["bins"] for c in told.values()), strict=True)]
    shares = _shares(bins)
    clients = {
        name: {**_moments(each, middle), "distance": _distance(_shares(each["bins"]), shares)}
        for name, each in told.items()
    }
    quantiles = {f"{q:g}": _quantile(bins, q, low, high) for q in _QUANTILES}
    return {
        **_moments(every, middle),
        "quantiles": quantiles,
        "bins": bins,
        "low": low,
        "high": high,
        "clients": clients,
    }


def _moments(sums: Mapping[str, Any], middle: float) -> dict[str, float | None]:
    count = sums["count"]
    if count <= 0:  # noise alone
        return {"count": count, "mean": None, "deviation": None}
    away = sums["sum"] / count
    return {"count": count, "mean": middle + away, "deviation": math.sqrt(max(sums["squares"] / count - away**2, 0.0))}


def _shares(bins: Sequence[float | None]) -> list[float]:
    whole = [max(many or 0.0, 0.0) for many in bins]
    total = math.fsum(whole)
    return [many / total for many in whole] if total else [0.0] * len(whole)


def _distance(own: Sequence[float], all_: Sequence[float]) -> float:
    return 0.5 * math.fsum(abs(a - b) for a, b in zip(own, all_, strict=True))


def _quantile(bins: Sequence[float], share: float, low: float, high: float) -> float | None:
    """Where so large a share of the values lies below, by a straight line inside of a bin."""
    shares = _shares(bins)
    if not any(shares):
        return None
    width, passed = (high - low) / (len(bins) - 2), 0.0
    for place, mine in enumerate(shares):
        if mine and passed + mine >= share - 1e-12:
            if place in (0, len(shares) - 1):
                return low if place == 0 else high
            return low + width * (place - 1 + min(max((share - passed) / mine, 0.0), 1.0))
        passed += mine
    return high
