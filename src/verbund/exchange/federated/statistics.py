"""What a client tells of its columns: sums alone, with as much noise as its owner wants, and nothing of few samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verbund.job.federated_statistics import ColumnStatistics

RELEASES = 4
"""Of a column: the count, the sum, the sum of squares, the histogram."""

Told = dict[str, Any]
"""Of a column: `count`, `sum` and `squares` of the values' distances from the middle between low and high, and `bins`:
how many are below, in each bin, and above; None for too few. Plain JSON values."""


def summed(parts: Iterable[NDArray[Any]], column: ColumnStatistics, bounded: bool) -> Told:
    """The sums over a column's values.

    Args:
        parts: the values, [n] each; what is missing (not a number) does not count.
        column: what is asked.
        bounded: values beyond low and high count as these, so that one value can change sums only so much.
    """
    middle = (column.low + column.high) / 2.0
    bins = np.zeros(column.bins + 2, np.int64)
    count, total, squares = 0, 0.0, 0.0
    for part in parts:
        values = np.asarray(part, np.float64)
        values = values[np.isfinite(values)]
        bins[0] += int((values < column.low).sum())
        bins[-1] += int((values > column.high).sum())
        bins[1:-1] += np.histogram(values, column.bins, (column.low, column.high))[0]
        away = (np.clip(values, column.low, column.high) if bounded else values) - middle
        count += len(values)
        total += float(away.sum())
        squares += float(np.square(away).sum())
    return {"count": count, "sum": total, "squares": squares, "bins": bins.tolist()}


def noisy(told: Told, column: ColumnStatistics, noise: float) -> Told:
    """The sums with Gaussian noise from the operating system's randomness: `RELEASES` of `noise` each.

    Args:
        told: of `summed`, bounded.
        column: what is asked.
        noise: standard deviation, as a multiple of how much one sample more or less changes each of the four.
    """
    from verbund.exchange.federated.privacy.noise import gaussian, source  # packages that not everybody has

    half = (column.high - column.low) / 2.0
    drawn = gaussian(source(None), column.bins + 5) * noise
    return {
        "count": told["count"] + float(drawn[0]),
        "sum": told["sum"] + half * float(drawn[1]),
        "squares": told["squares"] + half**2 * float(drawn[2]),
        "bins": [many + float(each) for many, each in zip(told["bins"], drawn[3:], strict=True)],
    }


def withheld(told: Told, minimum: int) -> Told | None:
    """The sums without those of fewer samples than `minimum`; None if these are all.

    Bins of few samples are left out, and so many more, the smallest first, that what is left out together, which
    follows from the count, is of `minimum` samples at least.
    """
    if told["count"] < minimum:
        return None
    bins: list[float | None] = list(told["bins"])
    few = [place for place, many in enumerate(told["bins"]) if 0 < many < minimum]
    hidden = sum(told["bins"][place] for place in few)
    others = sorted((many, place) for place, many in enumerate(told["bins"]) if many >= minimum)
    while few and hidden < minimum and others:
        many, place = others.pop(0)
        few.append(place)
        hidden += many
    for place in few:
        bins[place] = None
    return {**told, "bins": bins}


def noise_of(epsilon: float, delta: float, columns: int) -> float:
    """The noise of each release with which all statistics of so many columns cost at most (ε, δ)."""
    from verbund.exchange.federated.privacy.accountant import noise_for

    return noise_for(epsilon, delta, RELEASES * columns)


def permitted(asked: Sequence[str], may: Sequence[str]) -> bool:
    """Whether an owner lets all these columns be summed up; `*` stands for all."""
    return "*" in may or set(asked) <= set(may)
