"""Curves over the steps, as inline SVG with the values as a table besides."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from html import escape

from verbund.observe.report.scale import Scale, fit, number
from verbund.observe.report.text import details, table

WIDTH, HEIGHT = 520, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 12, 36
_LARGEST = 1e300  # beyond it, the differences that a scale needs are not finite
_NOISY = 100
_TABLE_ROWS = 25

Points = list[tuple[float, float]]


def curve(title: str, raw: Sequence[Sequence[float | None]], *, better: str | None = None) -> str:
    """A figure of a line through [step, value] pairs; what is not finite is left out, and said.

    Args:
        better: `larger` or `smaller`: the best value is marked.
    """
    points: Points = [(x, y) for x, y in raw if x is not None and y is not None and abs(y) < _LARGEST]
    if not points:
        return ""
    across = Scale(points[0][0], max(points[-1][0], points[0][0] + 1), _LEFT, WIDTH - _RIGHT)
    up = fit([y for _, y in points], HEIGHT - _BOTTOM, _TOP)
    noisy = len(points) >= _NOISY
    parts = [_axes(across, up), _line(points, across, up, "line raw" if noisy else "line")]
    if noisy:
        parts.append(_line(_smooth(points, up.logarithmic), across, up, "line"))
    note = f"{number(points[0][1])} at step {number(points[0][0])}, {number(points[-1][1])} at the end"
    if better is not None and len(points) > 1:
        step, value = (max if better == "larger" else min)(points, key=lambda p: p[1])
        parts.append(f'<circle class="best" cx="{across(step):.1f}" cy="{up(value):.1f}" r="3.5"/>')
        last = points[-1][1]
        note = f"{number(last)} at the end, "
        if step == points[-1][0]:
            note += "the best"
        else:
            note += (
                f"the best since step {number(step)}"
                if value == last
                else f"best {number(value)} at step {number(step)}"
            )
    dropped = len(raw) - len(points)
    lost = f"; without {dropped} that {'is' if dropped == 1 else 'are'} not finite" if dropped else ""
    rows = [(number(x), number(y)) for x, y in points[:: max(1, math.ceil(len(points) / _TABLE_ROWS))]]
    data = {
        "x": [across.low, across.high, across.start, across.end],
        "y": [up.low, up.high, up.start, up.end, up.logarithmic],
        "points": [[x, float(f"{y:.6g}")] for x, y in points],
    }
    smoothed = "; the strong line is smoothed" if noisy else ""
    scale = ", logarithmic" if up.logarithmic else ""
    return (
        f'<figure class="curve"><figcaption><b>{escape(title)}</b> {note}{lost}{scale}{smoothed}</figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(f"{title}: {note}")}" '
        f'data-curve="{escape(json.dumps(data, separators=(",", ":")))}">{"".join(parts)}</svg>'
        + details("Values", table(title, ("step", "value"), rows))
        + "</figure>"
    )


def _smooth(points: Points, logarithmic: bool) -> Points:
    """The mean (geometric on a logarithmic scale) around each point, with weights that fade over a fiftieth of the
    points to both sides, so that the line does not lag behind."""
    values = [math.log(y) if logarithmic else y for _, y in points]
    keep = 1 - 1 / max(len(points) / 50, 2)
    before, after = _fading(values, keep), _fading(values[::-1], keep)[::-1]
    smooth = []
    for (x, _), value, (sum_b, weight_b), (sum_a, weight_a) in zip(points, values, before, after, strict=True):
        mean = (sum_b + sum_a - value) / (weight_b + weight_a - 1.0)  # the point itself is in both sums
        smooth.append((x, math.exp(mean) if logarithmic else mean))
    return smooth


def _fading(values: list[float], keep: float) -> list[tuple[float, float]]:
    """For each value the sum of it and all before, each weighted `keep` to the power of its distance; and the weights'
    sum."""
    total = weight = 0.0
    sums = []
    for value in values:
        total, weight = keep * total + value, keep * weight + 1.0
        sums.append((total, weight))
    return sums


def _line(points: Points, across: Scale, up: Scale, kind: str) -> str:
    path = "M" + "L".join(f"{across(x):.1f},{up(y):.1f}" for x, y in points)
    if len(points) == 1:
        return f'<circle class="best" cx="{across(points[0][0]):.1f}" cy="{up(points[0][1]):.1f}" r="3.5"/>'
    return f'<path class="{kind}" d="{path}"/>'


def _axes(across: Scale, up: Scale) -> str:
    parts = []
    for value in up.ticks():
        y = up(value)
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="tick" x="{_LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{number(value)}</text>'
        )
    for value in across.ticks(6):
        if value == int(value):
            parts.append(
                f'<text class="tick" x="{across(value):.1f}" y="{HEIGHT - 18}" text-anchor="middle">'
                f"{number(value)}</text>"
            )
    parts.append(
        f'<text class="tick" x="{(_LEFT + WIDTH - _RIGHT) / 2}" y="{HEIGHT - 3}" text-anchor="middle">step</text>'
    )
    return "".join(parts)
