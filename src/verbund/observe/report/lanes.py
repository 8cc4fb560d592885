"""Bars and timelines per worker, as inline SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from verbund.observe.journal import Ints
from verbund.observe.report.scale import UNITS, linear_ticks, seconds, share
from verbund.observe.timeline import KINDS, Life

WIDTH = 860
_LEFT = 76
_LANE = 26
_BARS = 64
_LANES = 16
RECTANGLES = 700
"""Most spans that one timeline shows, of all its workers together."""
_STEPS = 12
# From the bottom up: where spans overlap, the topmost is what the moment counts for.
_LAYERS = ("start", "validate", "compute", "data", "checkpoint", "communicate", "wait")


def bars(rows: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    """One bar per worker: what its seconds went into; equal lengths are equal times."""
    shown = rows[:_BARS]
    longest = max((sum(taken.get(kind, 0.0) for kind in KINDS) for _, taken in shown), default=0.0)
    if longest <= 0:
        return ""
    parts, texts = [], []
    for lane, (name, taken) in enumerate(shown):
        total = sum(taken.get(kind, 0.0) for kind in KINDS)
        parts.append(_label(name, lane))
        x = float(_LEFT)
        for kind in KINDS:
            value = taken.get(kind, 0.0)
            width = value / longest * (WIDTH - _LEFT)
            if width < 0.05:
                continue
            words = f"{name}: {kind} {seconds(value)} ({share(value, total)})"
            parts.append(_rectangle(kind, x, width, lane, words))
            if width > 44:
                parts.append(
                    f'<text class="inside" x="{x + width / 2:.1f}" y="{lane * _LANE + 17}" text-anchor="middle">'
                    f"{100 * value / total:.0f} %</text>"
                )
            x += width
        texts.append(f"{name}: " + ", ".join(f"{k} {seconds(taken[k])}" for k in KINDS if taken.get(k)))
    more = f" (the first {_BARS} of {len(rows)})" if len(rows) > _BARS else ""
    return (
        f"<figure><figcaption><b>Each worker's seconds</b>{more}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {len(shown) * _LANE}" role="img" aria-label="{escape("; ".join(texts))}">'
        f"{''.join(parts)}</svg></figure>"
    )


@dataclass(frozen=True)
class Window:
    """A stretch of steps, and the moments (ns) from the first worker's begin of the first to the end of the last."""

    title: str
    begin: int
    end: int


def windows(lives: Sequence[Life]) -> list[Window]:
    """The first, middle and last steps of a generation: as many as fit into `RECTANGLES`, 12 at most."""
    taking = [life for life in lives if len(life.intervals["compute"])]
    if not taking:
        return []
    steps = np.unique(np.concatenate([life.intervals["compute"][:, 0] for life in taking]))
    spans = sum(len(rows) for life in taking[:_LANES] for rows in life.intervals.values())
    length = int(np.clip(RECTANGLES * len(steps) // max(spans, 1), 1, min(_STEPS, len(steps))))
    starts = {"First": 0, "Middle": (len(steps) - length) // 2, "Last": len(steps) - length}
    found: list[Window] = []
    taken = -1
    for title, start in starts.items():
        start = max(start, taken + 1)
        stop = min(start + length, len(steps)) - 1
        if start > stop:
            continue
        taken = stop
        first, last = int(steps[start]), int(steps[stop])
        begin, end = _moments(taking, first, last)
        if end > begin:
            what = f"{title} steps: {first} to {last}" if last > first else f"{title} step: {first}"
            found.append(Window(what, begin, end))
    return found


def timeline(lives: Sequence[Life], window: Window) -> str:
    """What each worker did when. Spans are clipped to the window; of too many the longest are shown."""
    shown = lives[:_LANES]
    length = window.end - window.begin
    spans = _spans(shown, window)
    total = len(spans)
    spans = sorted(spans, key=lambda span: span[2] - span[3])[:RECTANGLES]
    room = WIDTH - _LEFT
    layers: dict[str, list[str]] = {kind: [] for kind in _LAYERS}
    for lane, kind, start, end, step in spans:
        x, width = (start - window.begin) / length * room, (end - start) / length * room
        words = f"{shown[lane].journal.name}, step {step}: {kind} {seconds((end - start) / 1e9)}"
        layers[kind].append(_rectangle(kind, x, width, lane, words))
    divisor, unit = next((d, u) for d, u in UNITS if length >= d or d == 1.0)
    height = len(shown) * _LANE + 22
    ticks = "".join(
        f'<text class="tick" x="{_LEFT + value * divisor / length * room:.1f}" y="{height - 5}" '
        f'text-anchor="{"start" if value == 0 else "middle"}">{value:g} {unit}</text>'
        for value in linear_ticks(0, length / divisor * 0.98, 6)
    )
    labels = "".join(_label(life.journal.name, lane) for lane, life in enumerate(shown))
    text = f"{window.title}, {seconds(length / 1e9)} in all"
    left_out = []
    if total > len(spans):
        left_out.append(f"the longest {len(spans)} of {total} spans")
    if len(lives) > len(shown):
        left_out.append(f"the first {len(shown)} of {len(lives)} workers")
    caption = f"{seconds(length / 1e9)}" + (f"; shown are {' of '.join(left_out)}" if left_out else "")
    return (
        f'<figure class="timeline"><figcaption><b>{escape(window.title)}</b> {caption}</figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(text)}" tabindex="0" '
        f'data-left="{_LEFT}" data-seconds="{length / 1e9!r}">'
        f'<svg class="lanes" x="{_LEFT}" y="0" width="{room}" height="{len(shown) * _LANE}"><g class="spans">'
        f"{''.join(''.join(layers[kind]) for kind in _LAYERS)}</g></svg>"
        f'{labels}<g class="axis">{ticks}</g></svg></figure>'
    )


def _moments(lives: Sequence[Life], first: int, last: int) -> tuple[int, int]:
    begins, ends = [], []
    for life in lives:
        for kind in ("data", "compute", "communicate"):
            rows = life.intervals[kind]
            rows = rows[(rows[:, 0] >= first) & (rows[:, 0] <= last)]
            if len(rows):
                begins.append(int(rows[:, 1].min()))
                ends.append(int(rows[:, 2].max()))
    return min(begins, default=0), max(ends, default=0)


def _spans(lives: Sequence[Life], window: Window) -> list[tuple[int, str, int, int, int]]:
    """Lane, kind, start, end, step of all that happened within the window."""
    found = []
    for lane, life in enumerate(lives):
        for kind in _LAYERS:
            rows: Ints = life.intervals[kind]
            rows = rows[(rows[:, 2] > window.begin) & (rows[:, 1] < window.end)]
            longest = np.argsort(rows[:, 1] - rows[:, 2], kind="stable")[:RECTANGLES]
            found += [
                (lane, kind, max(start, window.begin), min(end, window.end), step)
                for step, start, end in rows[longest].tolist()
            ]
    return found


def _label(name: str, lane: int) -> str:
    return f'<text class="label" x="{_LEFT - 8}" y="{lane * _LANE + 17}" text-anchor="end">{escape(name)}</text>'


def _rectangle(kind: str, x: float, width: float, lane: int, words: str) -> str:
    return (
        f'<rect class="{kind}" x="{x:.2f}" y="{lane * _LANE + 3}" width="{max(width, 0.05):.2f}" '
        f'height="{_LANE - 6}"><title>{escape(words)}</title></rect>'
    )
