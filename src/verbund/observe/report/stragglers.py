"""Stragglers: whom the others waited for, and why."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from verbund.observe.report.scale import number, seconds
from verbund.observe.report.text import bullets, table
from verbund.observe.stragglers import CAUSES, named

_MOST = 256


def stragglers(summary: Mapping[str, Any]) -> str:
    """Sentences on each straggler, and a table of all workers."""
    found = summary.get("stragglers")
    if not isinstance(found, Mapping):
        return ""
    share = found["share"]
    of = f", {100 * share:.1f} % of the time after the start" if share is not None else ""
    lost = f"Lost to whoever came last: {seconds(found['lost_seconds'])}{of}. ({found['how']}.)"
    parts = [f"<p>{escape(lost)}</p>"]
    parts.append(bullets(_sentence(each) for each in found["found"]))
    if (shares := found.get("shares")) is not None:
        times = "once" if shares["changes"] == 1 else f"{shares['changes']} times"
        samples = ", ".join(map(str, shares["samples"][:_MOST]))
        said = f"Shares went by speed, and changed {times}; of a global batch the workers had {samples} samples at last"
        parts.append(f"<p>{escape(said)}.</p>")
    workers = found["workers"]
    causes = [cause for cause in CAUSES if any(row["excess"].get(cause) for row in workers)]
    head = ("", "lost to it", "own seconds a step", "samples a step", "times slower", *(CAUSES[c] for c in causes))
    rows = [
        (
            named(row),
            seconds(row["lost_seconds"]),
            seconds(row["seconds_per_step"]),
            "" if row["samples_per_step"] is None else number(row["samples_per_step"]),
            "" if row["slower"] is None else f"{row['slower']:.2f}",
            *(seconds(row["excess"].get(cause, 0.0)) for cause in causes),
        )
        for row in workers[:_MOST]
    ]
    parts.append(table("Own seconds, and what each has more than the median of the others, per step", head, rows))
    return "".join(parts)


def _sentence(row: Mapping[str, Any]) -> str:
    slower = f"{row['slower']:.1f} times slower than the others: " if row["slower"] and row["slower"] >= 1.05 else ""
    return f"{named(row)}: {slower}{CAUSES[row['cause']]}; {seconds(row['lost_seconds'])} were lost to it"
