"""Parameter servers: what they took in, and how stale it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from verbund.observe.report.scale import number, size
from verbund.observe.report.text import bullets, prose, table

_BARS = 24
_WIDTH, _ROW, _LEFT, _RIGHT = 720, 20, 72, 96


def servers(summary: Mapping[str, Any]) -> str:
    """Updates and their staleness as bars, what was replaced, and a table of the servers."""
    found = summary.get("servers")
    if not isinstance(found, Mapping):
        return ""
    staleness = found["staleness"]
    parts = [f"<p>{prose(_sentence(found))}</p>", _bars(staleness["histogram"])]
    parts.append(bullets(f"{each['why']}: {each['processes']} replaced" for each in found["replacements"]))
    counts = found["per_server"]
    keys = list(dict.fromkeys(key for each in counts.values() for key in each))
    if keys:
        rows = [(name, *(_cell(key, each.get(key, 0)) for key in keys)) for name, each in counts.items()]
        parts.append(table("Per server", ("", *(key.replace("_", " ") for key in keys)), rows))
    return "".join(parts)


def _sentence(found: Mapping[str, Any]) -> str:
    staleness = found["staleness"]
    text = f"{found['updates']} updates."
    if staleness["mean"] is not None:
        text += f" Staleness: {staleness['mean']:.2f} steps on average, {staleness['max']} at most."
    if found["late"]:
        text += f" {found['late']} shares came after their step had been taken without them, and were not used."
    if found["skipped"]:
        text += f" {found['skipped']} shares were not computed, as their step had been taken."
    if found["repeated"]:
        text += f" {found['repeated']} updates came twice, because a process was lost, and were taken once."
    return text


def _cell(key: str, value: float) -> str:
    if key.endswith("bytes"):
        return size(int(value))
    return f"{value:.2f}" if "seconds" in key else number(value)


def _bars(histogram: Sequence[Sequence[int]]) -> str:
    """Bars of updates by staleness; what is beyond the last one counts with it."""
    if not histogram or (len(histogram) == 1 and histogram[0][0] == 0):
        return ""
    shown = [list(bar) for bar in histogram[:_BARS]]
    rest = sum(count for _, count in histogram[_BARS:])
    shown[-1][1] += rest
    most = max(count for _, count in shown)
    room = _WIDTH - _LEFT - _RIGHT
    rows = []
    for place, (value, count) in enumerate(shown):
        y = place * _ROW
        label = f"{value} or more" if rest and place == len(shown) - 1 else str(value)
        length = max(1.0, room * count / most)
        rows.append(
            f'<text class="label" x="{_LEFT - 8}" y="{y + 14}" text-anchor="end">{escape(label)}</text>'
            f'<rect class="communicate" x="{_LEFT}" y="{y + 3}" width="{length:.1f}" height="{_ROW - 6}"></rect>'
            f'<text class="label" x="{_LEFT + length + 6:.1f}" y="{y + 14}">{count}</text>'
        )
    height = len(shown) * _ROW
    svg = f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="Updates by staleness">'
    return f"<figure>{svg}{''.join(rows)}</svg><figcaption>Updates by staleness, in steps.</figcaption></figure>"
