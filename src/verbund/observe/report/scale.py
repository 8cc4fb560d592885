"""Axes and numbers of the charts."""

from __future__ import annotations

import math
from dataclasses import dataclass

UNITS = ((1e9, "s"), (1e6, "ms"), (1e3, "µs"), (1.0, "ns"))


@dataclass(frozen=True)
class Scale:
    """Maps values from `low` … `high` to positions from `start` … `end`.

    Args:
        logarithmic: values and bounds are positive, and decades are equally long.
    """

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        low, high = self._inner(self.low), self._inner(self.high)
        return self.start + (self._inner(value) - low) / (high - low) * (self.end - self.start)

    def ticks(self, count: int = 5) -> list[float]:
        """Round values within the bounds, about `count` of them."""
        if not self.logarithmic:
            return linear_ticks(self.low, self.high, count)
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        stride = max(1, math.ceil((last - first) / count))
        factors = (1, 2, 5) if last - first < 3 else (1,)
        values = [factor * 10.0**power for power in range(first, last + 1, stride) for factor in factors]
        return [value for value in values if self.low <= value <= self.high]

    def _inner(self, value: float) -> float:
        return math.log10(value) if self.logarithmic else value


def fit(values: list[float], start: float, end: float) -> Scale:
    """A scale for `values`, which are finite: logarithmic where they are positive and span two decades."""
    low, high = min(values), max(values)
    if low > 0 and high / low > 100:
        return Scale(low, high, start, end, logarithmic=True)
    room = (high - low) * 0.05 or abs(high) * 0.1 or 1.0
    return Scale(low - room, high + room, start, end)


def linear_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten between two finite values."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    if raw <= 0 or not math.isfinite(raw):
        return [low]
    power = 10.0 ** math.floor(math.log10(raw))
    size = next((factor * power for factor in (1, 2, 5) if factor * power >= raw), 10 * power)
    first, last = math.ceil(low / size - 1e-9), math.floor(high / size + 1e-9)
    return [index * size for index in range(first, min(last, first + 4 * count) + 1)]


def number(value: float | None) -> str:
    """A number as people write it: 4 significant digits, thousands apart."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def seconds(value: float | None) -> str:
    """A length of time with the unit that suits it."""
    if value is None:
        return "not measured"
    if value >= 3600:
        return f"{value // 3600:.0f} h {value % 3600 // 60:02.0f} min"
    if value >= 120:
        return f"{value // 60:.0f} min {value % 60:02.0f} s"
    if value >= 100:
        return f"{value:.0f} s"
    if value >= 10:
        return f"{value:.1f} s"
    return f"{value:.2f} s" if value >= 0.1 or value == 0 else f"{value * 1e3:.3g} ms"


def size(value: float | None) -> str:
    """A number of bytes with the unit that suits it (powers of 1000)."""
    if value is None:
        return "not measured"
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:,.1f} TB"


def share(part: float, whole: float) -> str:
    """A percentage."""
    return f"{100 * part / whole:.1f} %" if whole > 0 else "–"
