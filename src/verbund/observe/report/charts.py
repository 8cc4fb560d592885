"""Charts as inline SVG. Every mark has a title, so that values can be read by pointing, and by a screen
reader."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from verbund.observe.timeline import KINDS, Life

Point = tuple[float, float]
_WIDTH, _HEIGHT = 720, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 14, 12, 30
_MARKS = 60
_RECTANGLES = 600
_ROW = 26


def number(value: float) -> str:
    """A number as people write it: 5 significant digits at most."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.4g}" if abs(value) < 1e5 else f"{value:,.0f}"


def curve(title: str, points: Sequence[Point], unit: str = "step") -> str:
    """A line through `points`; the vertical axis is logarithmic where values span more than two decades."""
    points = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    if not points:
        return ""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    logarithmic = min(ys) > 0 and max(ys) / min(ys) > 100
    scale = math.log10 if logarithmic else float
    low, high = scale(min(ys)), scale(max(ys))
    if high == low:
        low, high = low - 0.5, high + 0.5
    first, last = min(xs), max(max(xs), min(xs) + 1)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - first) / (last - first) * (_WIDTH - _LEFT - _RIGHT) + _LEFT
        up = (scale(y) - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)
        return across, _HEIGHT - _BOTTOM - up

    parts = [_axis(_WIDTH, _HEIGHT, first, last, low, high, logarithmic, unit)]
    path = " ".join(f"{'L' if i else 'M'}{x:.1f},{y:.1f}" for i, (x, y) in enumerate(place(*p) for p in points))
    parts.append(f'<path class="line" d="{path}"/>')
    for x, y in points[:: max(1, len(points) // _MARKS)]:
        across, down = place(x, y)
        parts.append(
            f'<circle class="mark" cx="{across:.1f}" cy="{down:.1f}" r="4">'
            f"<title>{unit} {number(x)}: {number(y)}</title></circle>"
        )
    text = f"{title}: {number(ys[0])} at {unit} {number(xs[0])}, {number(ys[-1])} at {unit} {number(xs[-1])}"
    return _figure(title, text, _WIDTH, _HEIGHT, parts)


def shares(rows: Sequence[tuple[str, dict[str, float]]]) -> str:
    """One bar per worker: what its seconds went into."""
    parts = []
    longest = max((sum(seconds.get(kind, 0.0) for kind in KINDS) for _, seconds in rows), default=0.0)
    if longest <= 0:
        return ""
    for index, (name, seconds) in enumerate(rows):
        top = index * _ROW
        parts.append(f'<text class="label" x="{_LEFT + 22}" y="{top + 17}" text-anchor="end">{escape(name)}</text>')
        left = _LEFT + 30.0
        for kind in KINDS:
            width = seconds.get(kind, 0.0) / longest * (_WIDTH - _LEFT - 30 - _RIGHT)
            if width <= 0:
                continue
            share = seconds[kind] / max(sum(seconds.get(k, 0.0) for k in KINDS), 1e-12)
            parts.append(
                f'<rect class="{kind}" x="{left:.1f}" y="{top + 4}" width="{width:.2f}" height="{_ROW - 8}">'
                f"<title>{escape(name)}: {kind} {seconds[kind]:.2f} s ({share:.1%})</title></rect>"
            )
            left += width
    text = "; ".join(f"{name}: " + ", ".join(f"{k} {s.get(k, 0.0):.2f} s" for k in KINDS) for name, s in rows)
    return _figure("Where the workers' time went", text, _WIDTH, len(rows) * _ROW + 4, parts)


@dataclass(frozen=True)
class Window:
    """A stretch of steps that a timeline shows."""

    title: str
    first: int
    last: int


def windows(steps: int, length: int = 8) -> list[Window]:
    """The first, middle and last steps of a run."""
    if steps <= 0:
        return []
    starts = {"First": 0, "Middle": max(0, steps // 2 - length // 2), "Last": max(0, steps - length)}
    shown: list[Window] = []
    for title, start in starts.items():
        end = min(start + length, steps) - 1
        if not any(window.first == start for window in shown):
            shown.append(Window(f"{title} steps ({start} to {end})", start, end))
    return shown


def timeline(lives: Sequence[Life], window: Window) -> str:
    """What each worker did when, in a window of steps."""
    spans: list[tuple[int, str, int, int, int]] = []
    for row, life in enumerate(lives):
        for kind in ("compute", "data", "wait", "communicate", "checkpoint", "validate"):
            rows = life.intervals.get(kind)
            if rows is None or not len(rows):
                continue
            inside = rows[(rows[:, 0] >= window.first) & (rows[:, 0] <= window.last)]
            spans += [
                (row, kind, int(step), int(start), int(end)) for step, start, end in inside[:_RECTANGLES].tolist()
            ]
    if not spans:
        return ""
    begin, end = min(span[3] for span in spans), max(span[4] for span in spans)
    length = max(end - begin, 1)
    parts = []
    for row, life in enumerate(lives):
        parts.append(
            f'<text class="label" x="{_LEFT + 22}" y="{row * _ROW + 17}" text-anchor="end">'
            f"{escape(life.journal.name)}</text>"
        )
    room = _WIDTH - _LEFT - 30 - _RIGHT
    for row, kind, step, start, stop in spans[: _RECTANGLES * 2]:
        left = _LEFT + 30 + (start - begin) / length * room
        width = max((stop - start) / length * room, 0.3)
        parts.append(
            f'<rect class="{kind}" x="{left:.2f}" y="{row * _ROW + 4}" width="{width:.2f}" height="{_ROW - 8}">'
            f"<title>step {step}: {kind} {(stop - start) / 1e6:.2f} ms</title></rect>"
        )
    height = len(lives) * _ROW + 22
    parts.append(f'<text class="tick" x="{_LEFT + 30}" y="{height - 4}">0</text>')
    parts.append(
        f'<text class="tick" x="{_WIDTH - _RIGHT}" y="{height - 4}" text-anchor="end">{length / 1e6:.1f} ms</text>'
    )
    return _figure(window.title, f"{window.title}: {length / 1e6:.1f} ms", _WIDTH, height, parts, zoom=True)


def _axis(
    width: int, height: int, first: float, last: float, low: float, high: float, logarithmic: bool, unit: str
) -> str:
    parts = []
    for value in _ticks(low, high):
        down = height - _BOTTOM - (value - low) / (high - low) * (height - _TOP - _BOTTOM)
        label = number(10**value if logarithmic else value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{width - _RIGHT}" y1="{down:.1f}" y2="{down:.1f}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{down + 4:.1f}" text-anchor="end">{label}</text>')
    for value in _ticks(first, last):
        across = _LEFT + (value - first) / (last - first) * (width - _LEFT - _RIGHT)
        parts.append(
            f'<text class="tick" x="{across:.1f}" y="{height - 10}" text-anchor="middle">{number(value)}</text>'
        )
    parts.append(f'<text class="tick" x="{width - _RIGHT}" y="{height - 1}" text-anchor="end">{unit}</text>')
    return "".join(parts)


def _ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers between two values."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    size = next(m * power for m in (1, 2, 5, 10) if m * power >= raw)
    start = math.ceil(low / size - 1e-9)
    return [round(index * size, 12) for index in range(start, int(math.floor(high / size + 1e-9)) + 1)]


def _figure(title: str, text: str, width: int, height: int, parts: Sequence[str], zoom: bool = False) -> str:
    kind = ' class="zoom"' if zoom else ""
    return (
        f"<figure{kind}><figcaption>{escape(title)}</figcaption>"
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(text, quote=True)}">'
        f"{''.join(parts)}</svg></figure>"
    )
