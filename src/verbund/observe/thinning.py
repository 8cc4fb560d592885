"""Journals at their limit, which keep only some steps: which, and how many each of them stands for. No torch."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from verbund.observe.events import NEVER
from verbund.observe.journal import Floats, Ints, ProcessJournal

Eras = list[tuple[int, int]]
"""First step and stride of each stretch of steps of which some workers kept the same ones."""


def eras(journals: Iterable[ProcessJournal]) -> Eras:
    """The stretches in which all of these processes kept the same steps."""
    found = sorted((int(step), int(stride)) for journal in journals for step, stride in journal.thinned)
    result = [(0, 1)]
    for step, stride in found:
        if stride > result[-1][1]:
            if step == result[-1][0]:
                result.pop()
            result.append((step, stride))
    return result


def kept(rows: Ints, found: Eras, column: int = 0) -> Ints:
    """The rows of steps that all kept; `column` holds the step."""
    if len(found) == 1 and found[0][1] == 1:
        return rows
    result: Ints = rows[rows[:, column] % strides(rows[:, column], found) == 0]
    return result


def strides(steps: Ints, found: Eras) -> Ints:
    """Of so many steps one is kept."""
    table: Ints = np.array(found, np.int64)
    result: Ints = table[np.maximum(np.searchsorted(table[:, 0], steps, side="right") - 1, 0), 1]
    return result


def factors(steps: Ints, found: Eras) -> Floats:
    """How many steps each kept one stands for."""
    every = strides(steps, found)
    return np.where(every >= NEVER, 0, every).astype(np.float64)
