"""Workers that came and went: how many there were when, and what that cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verbund.observe.report.text import bullets, prose, table

_ROWS = 200


def membership(summary: Mapping[str, Any]) -> str:
    """A sentence, what was replaced, and a table of the eras; nothing where nobody came or went."""
    found = summary.get("membership")
    if not isinstance(found, Mapping) or (len(found["eras"]) < 2 and not found["replacements"]):
        return ""
    eras = found["eras"]
    text = f"Members changed {len(eras) - 1} times, which took {found['seconds_lost']:.2f} s from training; "
    text += f"{found['steps_redone']} steps had to be done again."
    rows = [
        (f"{era['seconds']:.1f} s", str(era["workers"]), ", ".join(map(str, era["members"]))) for era in eras[-_ROWS:]
    ]
    parts = [f"<p>{prose(text)}</p>", bullets(each["why"] for each in found["replacements"][-_ROWS:])]
    parts.append(bullets(_recovered(each) for each in found.get("recoveries", [])[-_ROWS:]))
    parts.append(bullets(_left_out(each) for each in found.get("islands", [])[-_ROWS:]))
    parts.append(table("Members over time", ("from", "workers", "which"), rows))
    return "".join(parts)


def _left_out(each: Mapping[str, Any]) -> str:
    said = []
    if each["out"]:
        said.append(f"went on without island {', '.join(map(str, each['out']))}")
    if each["back"]:
        said.append(f"took in island {', '.join(map(str, each['back']))}")
    lost = f"; {each['samples_lost']} samples were lost with what it had not sent" if each["samples_lost"] else ""
    return f"After step {each['step']} the islands {' and '.join(said) or 'met anew'}{lost}"


def _recovered(each: Mapping[str, Any]) -> str:
    whose = "the memory of peers that held the same" if each["how"] == "peers" else "mirrors in memory"
    return f"After step {each['step']} training went on from {whose}; steps done again: {each['again']}"
