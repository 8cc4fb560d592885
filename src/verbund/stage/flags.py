"""What workers tell each other with every step, so that all stop or regroup at the same border.

Each worker's flag is added up with the gradients or updates. Only one worker looks at the clock and for a new era, so
that the sum tells the three apart.
"""

from __future__ import annotations

TIME, CHANGE, INTERRUPT = 1.0, 2.0, 4.0


def ends(flags: float) -> str | None:
    """Why all stop after this step, if they do; `flags` is the sum."""
    return "interrupt" if flags >= INTERRUPT else "seconds" if flags % CHANGE >= TIME else None


def changes(flags: float) -> bool:
    """Whether the members change after this step."""
    return flags % INTERRUPT >= CHANGE
