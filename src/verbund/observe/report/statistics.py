"""How the data of federated clients differ, from what their owners let be told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verbund.observe.report.text import bullets, prose, table

_CLIENTS = 50


def statistics(summary: Mapping[str, Any]) -> str:
    """A table for each column, with a row for all clients and one for each; and who has told nothing."""
    found = summary.get("statistics")
    if not isinstance(found, Mapping):
        return ""
    noise = " Some owners have added noise." if found.get("noise") else ""
    parts = [
        "<p>"
        + prose(
            "Sums that clients told of their columns before training. Distance: how far a client's histogram is from "
            f"that of all, from 0 (the same) to 1 (nothing in common).{noise}"
        )
        + "</p>"
    ]
    head = ("", "count", "mean", "deviation", "distance")
    for name, column in (found.get("columns") or {}).items():
        if column is None:
            parts.append(f"<p>{prose(f'{name}: nothing was told.')}</p>")
            continue
        marks = ", ".join(f"{float(q):.0%}: {_plain(value)}" for q, value in column["quantiles"].items())
        rows = [("all", *_cells(column), "")]
        clients = sorted(column["clients"].items(), key=lambda item: (-item[1]["distance"], item[0]))
        rows += [(client, *_cells(each), f"{each['distance']:.2f}") for client, each in clients[:_CLIENTS]]
        parts.append(table(f"{name} (quantiles, to the width of a bin: {marks})", head, rows))
    parts.append(bullets(f"{client} told nothing: {why}" for client, why in (found.get("declined") or {}).items()))
    return "".join(parts)


def _cells(sums: Mapping[str, Any]) -> tuple[str, str, str]:
    return f"{sums['count']:.0f}", _plain(sums["mean"]), _plain(sums["deviation"])


def _plain(value: Any) -> str:
    return "" if value is None else f"{value:.4g}"
