"""The rounds of federated learning, from a run's journals. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from verbund.observe.journal import ProcessJournal

TABLE_ROWS = 500
_LISTED = 1000
HOW = {
    "bytes": "of all clients, were they elsewhere: what each would receive and send of tensors",
    "agreement": "the mean cosine of a client's difference with the mean of all, weighted by the differences' norms",
}


def measure(journals: Sequence[ProcessJournal]) -> dict[str, Any] | None:
    """`rounds` of a summary; None without any.

    `count` rounds led to the model as it is; `table` has of each (of the last `TABLE_ROWS`) the clients that trained,
    how many were refused, the weights' smallest and largest, the clients' loss over their local steps, the norms of
    their differences, `agreement`, and bytes. `participation` tells how many clients have trained how often
    (`histogram`: [times, clients]) and, of up to 1000 clients, how often each has; `refused` how often each client's
    update was, with the last reason; `bytes` are totals, with `how` they were counted.
    """
    rounds: dict[int, Mapping[str, Any]] = {}
    limit: float = float("inf")
    for generation in sorted({journal.generation for journal in journals}, reverse=True):
        mine = [
            event
            for journal in journals
            if journal.generation == generation
            for event in journal.events
            if event["name"] == "round" and int(event["round"]) < limit
        ]
        # What an earlier generation did beyond the round at which a later one went on was lost.
        rounds.update({int(event["round"]): event for event in mine})
        limit = min([limit, *(int(event["round"]) for event in mine)])
    if not rounds:
        return None
    events = [rounds[number] for number in sorted(rounds)]
    times: Counter[int] = Counter()
    refused: dict[str, dict[str, Any]] = {}
    for event in events:
        times.update(event.get("cohort") or [])
        for client, reason in (event.get("refused") or {}).items():
            known = refused.setdefault(str(client), {"times": 0, "reason": ""})
            known["times"], known["reason"] = known["times"] + 1, str(reason)
    whole = all(event.get("cohort") is not None for event in events)
    return {
        "count": len(events),
        "clients": events[-1].get("clients"),
        "table": [_row(event) for event in events[-TABLE_ROWS:]],
        "participation": {
            "clients": len(times) if whole else None,
            "histogram": [list(pair) for pair in sorted(Counter(times.values()).items())] if whole else None,
            "per_client": {str(c): n for c, n in sorted(times.items())} if whole and len(times) <= _LISTED else None,
        },
        "refused": refused,
        "bytes": {way: sum(int(event["bytes"][way]) for event in events) for way in ("down", "up")},
        "how": HOW,
    }


def _row(event: Mapping[str, Any]) -> dict[str, Any]:
    weights = event.get("weights") or []
    return {
        "round": event["round"],
        "clients": event["clients"],
        "refused": len(event.get("refused") or {}),
        "weights": [min(weights), max(weights)] if weights else None,
        "loss": event.get("loss"),
        "norm": event.get("norm"),
        "agreement": event.get("agreement"),
        "staleness": event.get("staleness"),
        "bytes": event.get("bytes"),
    }
