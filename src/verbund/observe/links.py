"""The links between the hosts of a run: what each can do, and what was sent over it. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from verbund.observe.journal import Ints, ProcessJournal
from verbund.observe.timeline import Life, Timeline, union

HOW = (
    "latency and rate of each link were measured before the run, one pair of hosts after the other, over TLS; bytes "
    "sent are counted by the kernel, and with headers estimated, which is what the network's interfaces count"
)
NEAR_LIMIT = 0.8
"""From which share of its time on a host's link counts as what holds up a run."""
_SENDING = ("worker", "server")


def network(journals: Sequence[ProcessJournal], timeline: Timeline) -> dict[str, Any] | None:
    """What `summary.json` says of the network; None for a run on one host.

    `links` are the directed pairs of hosts: `latency` in seconds and `bandwidth` in bytes per second as measured;
    `sent`, the bytes that workers and parameter servers sent over it; `rate`, those per second while its workers
    communicated. `hosts` have what they `sent` and `received`, as `wire_sent` and `wire_received` with all headers, the
    measurement included; `communicating`, the seconds in which a worker there had a collective under way; and
    `used_out` and `used_in`, the share of them for which its link was full.
    """
    events = [event for journal in journals for event in journal.events if event["name"] == "network"]
    measured = _Measured.of(events)
    if measured is None:
        return None
    sent = _between(journals, measured.hosts)
    lives = {host: [life for life in timeline.lives if life.journal.address == host] for host in measured.hosts}
    # A journal at its limit has not all of it.
    busy = {host: None if timeline.estimated else _busy(lives[host]) for host in measured.hosts}
    links: list[dict[str, Any]] = []
    for (source, target), (latency, bandwidth) in measured.links.items():
        count, seconds = sent[source, target], busy[source]
        links.append(
            {
                "from": source,
                "to": target,
                "latency": latency,
                "bandwidth": bandwidth,
                "sent": count,
                "rate": count / seconds if seconds else None,
            }
        )
    hosts = _hosts(journals, events, measured.hosts)
    for host, seconds in busy.items():
        hosts[host]["communicating"] = seconds
        for way, end in (("used_out", "from"), ("used_in", "to")):
            full = sum(link["sent"] / link["bandwidth"] for link in links if link[end] == host and link["bandwidth"])
            hosts[host][way] = min(full / seconds, 1.0) if seconds else None
    return {"hosts": hosts, "links": links, "how": HOW}


def fullest(found: Mapping[str, Any]) -> tuple[dict[str, Any], float] | None:
    """The link that was used most among those of a host whose link was near its limit, and that host's share."""
    best: tuple[dict[str, Any], float] | None = None
    for host, counts in found["hosts"].items():
        for way, end in (("used_out", "from"), ("used_in", "to")):
            used = counts[way]
            mine = [link for link in found["links"] if link[end] == host and link["rate"]]
            if used is not None and used >= NEAR_LIMIT and mine and (best is None or used > best[1]):
                best = max(mine, key=lambda link: float(link["rate"])), used
    return best


class _Measured:
    """What was measured last of the links, checked: journals are not trusted."""

    def __init__(self, hosts: list[str], links: dict[tuple[str, str], tuple[float, float]]) -> None:
        self.hosts, self.links = hosts, links

    @staticmethod
    def of(events: Sequence[Mapping[str, Any]]) -> _Measured | None:
        if not events or not isinstance(events[-1].get("hosts"), list) or not isinstance(events[-1].get("links"), list):
            return None
        hosts = [str(host)[:255] for host in events[-1]["hosts"]]
        links = {}
        for link in events[-1]["links"]:
            try:
                pair = hosts[link["from"]], hosts[link["to"]]
                links[pair] = max(float(link["latency"]), 0.0), max(float(link["bandwidth"]), 0.0)
            except (TypeError, KeyError, IndexError, ValueError):
                continue
        return _Measured(hosts, links)


def _between(journals: Sequence[ProcessJournal], hosts: Sequence[str]) -> dict[tuple[str, str], int]:
    """Bytes that workers and parameter servers on one host have sent to another."""
    sent: dict[tuple[str, str], int] = defaultdict(int)
    for journal in journals:
        if journal.role in _SENDING and journal.address in hosts:
            for peer, (count, _) in (journal.links or {}).items():
                if (target := _host_of(peer)) != journal.address:
                    sent[journal.address, target] += count
    return sent


def _hosts(
    journals: Sequence[ProcessJournal], events: Sequence[Mapping[str, Any]], hosts: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """What each host has sent and received over the network, by payload and with headers."""
    found = {host: dict.fromkeys(("sent", "received", "wire_sent", "wire_received"), 0) for host in hosts}

    def add(host: str, prefix: str, counts: Any) -> None:
        if host in found and isinstance(counts, (list, tuple)) and [type(count) for count in counts] == [int, int]:
            found[host][f"{prefix}sent"] += counts[0]
            found[host][f"{prefix}received"] += counts[1]

    for journal in journals:
        for prefix, links in (("", journal.links), ("wire_", journal.wire)):
            for peer, counts in (links or {}).items():
                if _host_of(peer) != journal.address:
                    add(journal.address, prefix, counts)
    for event in events:
        for prefix, key in (("", "bytes"), ("wire_", "wire")):
            for host, counts in zip(event.get("hosts") or (), event.get(key) or (), strict=False):
                add(str(host), prefix, counts)
    return found


def _host_of(peer: str) -> str:
    return peer.rpartition(":")[0].strip("[]").removeprefix("::ffff:")


def _busy(lives: Sequence[Life]) -> float | None:
    """Seconds in which one of the workers of a host had a collective or message under way, and did not just wait for
    another worker to come to it."""
    intervals = [_busy_of(life) for life in lives]
    together = union(np.concatenate(intervals)) if intervals else np.empty((0, 2), np.int64)
    return float((together[:, 1] - together[:, 0]).sum()) / 1e9 if len(together) else None


def _busy_of(life: Life) -> Ints:
    rows = np.concatenate((life.journal.collectives[:, (2, 4)], life.intervals["communicate"][:, 1:]))
    under_way = union(rows)
    waited = union(life.intervals["wait"][:, 1:])
    return _without(under_way, waited)


def _without(whole: Ints, holes: Ints) -> Ints:
    """Disjoint intervals in order, without others that are so too."""
    edges = np.concatenate((whole.ravel(), holes.ravel()))
    change = np.concatenate((np.tile((1, -1), len(whole)), np.tile((-1, 1), len(holes))))
    order = np.lexsort((change, edges))
    level = np.cumsum(change[order])
    edges = edges[order]
    begins = np.flatnonzero(level[:-1] == 1)
    return np.stack((edges[begins], edges[begins + 1]), axis=1)
