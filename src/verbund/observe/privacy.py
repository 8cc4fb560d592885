"""What privacy a federated training has spent, from a run's journals. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verbund.observe.journal import ProcessJournal

_KEYS = ("epsilon", "epsilon_rdp", "epsilon_pld", "delta", "budget", "releases", "statement")


def measure(journals: Sequence[ProcessJournal]) -> dict[str, Any] | None:
    """`privacy` of a summary; None without any.

    `epsilon` at `delta` over all rounds (`releases`) that led to the model, the smaller of the bounds `epsilon_rdp` and
    `epsilon_pld`; `budget`, and `statement`, which says in words what is protected and what sampling was counted on.
    """
    found = [
        (journal.generation, event) for journal in journals for event in journal.events if event["name"] == "privacy"
    ]
    if not found:
        return None
    _, last = max(found, key=lambda item: (item[0], item[1]["releases"]))
    return {key: last.get(key) for key in _KEYS}
