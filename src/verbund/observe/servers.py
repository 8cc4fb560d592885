"""What parameter servers did, from a run's journals. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from verbund.observe.journal import ProcessJournal

HOW = (
    "of each push the steps that the servers took between the pull of its parameters and its own step, the largest of "
    "its blocks, by their versions"
)


def measure(journals: Sequence[ProcessJournal]) -> dict[str, Any] | None:
    """`servers` of a summary; None without any.

    `staleness` has the `histogram` ([value, updates]), `mean` and `max` of all updates; `updates` is how many there
    were; `late` how many shares came after their step was taken and were not used; `skipped` how many were not even
    computed, as that was known; `repeated` how many updates had come before, from a process that was lost since;
    `replacements` what was replaced and why; `per_server` its own counts.
    """
    workers = [j.served for j in journals if j.role == "worker" and j.served]
    servers = [j for j in journals if j.role == "server"]
    if not workers and not servers:
        return None
    histogram: Counter[int] = Counter()
    for counts in workers:
        for value, updates in counts["staleness"]:
            histogram[value] += updates
    updates = histogram.total()
    per_server: dict[str, Counter[str]] = {}
    for journal in servers:
        per_server.setdefault(journal.name, Counter()).update(journal.server or {})
    replacements = [
        {"processes": str(event.get("processes", "")), "why": str(event.get("why", ""))}
        for journal in journals
        for event in journal.events
        if event["name"] == "replacement"
    ]
    return {
        "updates": updates,
        "staleness": {
            "mean": round(sum(v * n for v, n in histogram.items()) / updates, 6) if updates else None,
            "max": max(histogram, default=None),
            "histogram": [[value, count] for value, count in sorted(histogram.items())],
            "how": HOW,
        },
        "late": sum(int(counts.get("late", 0)) for counts in workers),
        "skipped": sum(int(counts.get("skipped", 0)) for counts in workers),
        "repeated": sum(int(counts.get("known", 0)) for counts in workers),
        "replacements": replacements,
        "per_server": {name: dict(counts) for name, counts in sorted(per_server.items())},
    }
