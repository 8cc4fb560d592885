"""Federated learning: its rounds, who took part, and whose updates were refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verbund.observe.report.scale import number, size
from verbund.observe.report.text import bullets, prose, table

_ROWS = 30
_REFUSED = 20


def rounds(summary: Mapping[str, Any]) -> str:
    """In words, a table of the last rounds, participation, and refused clients."""
    found = summary.get("rounds")
    if not isinstance(found, Mapping):
        return ""
    rows = [
        (
            str(row["round"] + 1),
            str(row["clients"]),
            str(row["refused"] or ""),
            "" if row["weights"] is None else f"{row['weights'][0]:g} – {row['weights'][1]:g}",
            _plain(row["loss"]),
            _plain((row["norm"] or {}).get("mean")),
            "" if row["agreement"] is None else f"{row['agreement']:.2f}",
            str(row["staleness"] or ""),
        )
        for row in found["table"][-_ROWS:]
    ]
    head = ("round", "clients", "refused", "weights", "loss", "norm", "agreement", "staleness")
    parts = [f"<p>{prose(_sentence(found))}</p>"]
    if isinstance(privacy := summary.get("privacy"), Mapping):
        parts.append(f"<p>Privacy: {prose(privacy.get('statement'))}</p>")
    parts.append(table("The last rounds", head, rows))
    histogram = (found.get("participation") or {}).get("histogram")
    if histogram:
        pairs = [(str(times), number(clients)) for times, clients in histogram]
        parts.append(table("Clients by the rounds they took part in", ("rounds", "clients"), pairs))
    refused = sorted(found["refused"].items(), key=lambda item: -item[1]["times"])
    parts.append(
        bullets(f"client {c} was refused {each['times']} times: {each['reason']}" for c, each in refused[:_REFUSED])
    )
    return "".join(parts)


def _sentence(found: Mapping[str, Any]) -> str:
    moved = found["bytes"]
    text = f"{found['count']} rounds, {found['clients']} clients in the last one. "
    clients = (found.get("participation") or {}).get("clients")
    if clients:
        text += f"{clients} clients have taken part. "
    text += (
        f"Clients received {size(moved['down'])} and sent {size(moved['up'])} in all (in a simulation: would have). "
    )
    return (
        text + "Norm: of the clients' differences, the mean. Agreement: how far these point the same way, from 0 to 1."
    )


def _plain(value: Any) -> str:
    return "" if value is None else f"{value:.4g}"
