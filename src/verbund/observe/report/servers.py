"""Parameter servers: what they took in, and how stale it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from verbund.observe.report.scale import number, size
from verbund.observe.report.text import bullets, prose, table

_BARS = 24
_WIDTH, _ROW, _LEFT, _RIGHT = 720, 20, 72, 96
_ALWAYS = ("pushes", "applied", "bytes", "applying_seconds")
_WORDS = {
    "pushes": "pushes",
    "applied": "parts of them that were steps",
    "waiting": "that waited for other islands'",
    "late": "that came too late",
    "known": "that had come before",
    "rows": "rows of tables",
    "bytes": "bytes in pushes",
    "pulls": "pulls",
    "pulled_bytes": "bytes sent for them",
    "applying_seconds": "seconds of steps",
    "records": "records of other servers",
    "replicated_bytes": "bytes to replicas",
    "log_bytes": "bytes to the log",
    "log_sync_seconds": "seconds of syncing it",
    "log_snapshots": "times it began anew",
}
"""Of a server's counts what they are called; but for some, a column of zeros is left out."""


def servers(summary: Mapping[str, Any]) -> str:
    """Updates and their staleness as bars, what was replaced, and a table of the servers."""
    found = summary.get("servers")
    if not isinstance(found, Mapping):
        return ""
    staleness = found["staleness"]
    parts = [f"<p>{prose(_sentence(found))}</p>", _bars(staleness["histogram"])]
    parts.append(bullets(f"{each['why']}: {each['processes']} replaced" for each in found["replacements"]))
    counts = found["per_server"]
    shown = {
        key: words for key, words in _WORDS.items() if key in _ALWAYS or any(each.get(key) for each in counts.values())
    }
    if counts:
        rows = [(name, *(_cell(key, each.get(key, 0)) for key in shown)) for name, each in counts.items()]
        parts.append(table("What each server did", ("", *shown.values()), rows))
    return "".join(parts)


def _sentence(found: Mapping[str, Any]) -> str:
    staleness = found["staleness"]
    text = f"{found['updates']} updates."
    if staleness["mean"] is not None:
        text += f" Staleness: {staleness['mean']:.2f} steps on average, {staleness['max']} at most."
    if found["late"]:
        text += f" {found['late']} shares came after their step had been taken without them, and were not used."
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
