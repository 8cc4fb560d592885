"""Pauses for Python's garbage collection, which hold all threads of a process."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

from verbund.observe.events import Journal

SHORTEST_NS = 10_000_000
"""Shorter pauses are not recorded."""


def record_pauses(journal: Journal, shortest: int = SHORTEST_NS) -> Callable[[], None]:
    """Has the journal record every pause of this process of at least `shortest` nanoseconds.

    Returns:
        what ends that.
    """
    begun = 0

    def called(phase: str, _: dict[str, Any]) -> None:
        # May be called between any two bytecodes, within a write of the journal too: so it only adds a row.
        nonlocal begun
        now = time.monotonic_ns()
        if phase == "start":
            begun = now
        elif begun and now - begun >= shortest:
            journal.garbage(begun, now)

    def end() -> None:
        if called in gc.callbacks:
            gc.callbacks.remove(called)

    gc.callbacks.append(called)
    return end
