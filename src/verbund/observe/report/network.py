"""The links between hosts as tables."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from verbund.observe.report.scale import seconds, share, size
from verbund.observe.report.text import table

_LINKS = 200


def network(summary: Mapping[str, Any], job: Mapping[str, Any]) -> str:
    """What travels over the links, what each can do and what the run used of it; nothing for a run on one host."""
    found = summary.get("network")
    if not isinstance(found, Mapping):
        return ""
    links = found.get("links") or []
    rows = [
        (
            f"{link['from']} → {link['to']}",
            seconds(link["latency"]),
            _rate(link["bandwidth"]),
            size(link["sent"]),
            _rate(link["rate"]),
            share(link["rate"] or 0.0, link["bandwidth"]) if link["rate"] is not None else "not measured",
        )
        for link in links[:_LINKS]
    ]
    title = f"Links ({len(rows)} of {len(links)})" if len(links) > len(rows) else "Links"
    head = ("", "latency", "can carry", "sent", "sent while communicating", "of what it can carry")
    hosts = [
        (
            str(host),
            size(counts["sent"]),
            size(counts["received"]),
            size(counts["wire_sent"]),
            size(counts["wire_received"]),
            seconds(counts["communicating"]),
            *(
                share(counts[way], 1.0) if counts[way] is not None else "not measured"
                for way in ("used_out", "used_in")
            ),
        )
        for host, counts in (found.get("hosts") or {}).items()
    ]
    columns = (
        "",
        "sent",
        "received",
        "sent with headers (estimate)",
        "received with headers (estimate)",
        "communicating",
        "link full, out",
        "link full, in",
    )
    how = f"<p>{escape(str(found.get('how', '')).capitalize())}.</p>"
    return f"<p>{escape(_carried(summary, job))}</p>" + table(title, head, rows) + table("Hosts", columns, hosts) + how


def _carried(summary: Mapping[str, Any], job: Mapping[str, Any]) -> str:
    """What went over the links, and who could have read it."""
    cluster = job.get("cluster")
    trusted = cluster.get("trusted_network") if isinstance(cluster, Mapping) else None
    if trusted:
        return (
            f"Workers of different hosts exchange tensors without encryption, within the trusted network {trusted}; "
            "what the command and the processes tell each other is encrypted."
        )
    return "All that travels between hosts is encrypted: what islands exchange, and what the command is told."


def _rate(value: float | None) -> str:
    """Bytes per second as bits, which is how links are named."""
    if value is None:
        return "not measured"
    bits = 8 * value
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"
