"""Which workers the others had to wait for, what that cost, and why. No torch.

A worker's **own seconds** of a step are those in which it read data or computed, and was not blocked by others: they
need no clock but its own, so workers on several hosts can be compared. Workers that come together in every step (a
mesh, islands that add up gradients, or that share each ticket of parameter servers) **lose** in it what the one with
the most own seconds has more than the median (the lower one of an even number): what the step would have been shorter
by if that one had been like half of the others. That is charged to it. Islands that train alone come together in an
exchange: there an island's own seconds are the sum, over the steps since the former exchange, of its slowest worker's.
Islands that wait for nobody (asynchronous servers) lose nothing.

What a worker has more than the median of its peers (in pipelines those with the same stage, if there are any) is
divided among its causes in this order: reading data, garbage collection, more samples (or samples of more weight, such
as tokens), and the rest, slow computing. (What a step would take if a worker were like the others is also what Lin et
al. ask, in "Understanding stragglers in large model training using what-if analysis", OSDI 2025.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from verbund.observe.events import EXCHANGES, PART_BITS
from verbund.observe.journal import Floats, Ints
from verbund.observe.own_time import OwnTime, own_times
from verbund.observe.thinning import eras, factors
from verbund.observe.timeline import Life, Timeline, Who

HOW = (
    "per step, the own seconds (reading data and computing, not blocked) of the slowest worker less those of the lower "
    "median; between islands that train alone, per exchange"
)
CAUSES = {
    "compute": "slow compute",
    "data": "slow data",
    "garbage": "garbage collection",
    "samples": "more samples than others",
    "stage": "a long stage of the pipeline",
    "link": "a slow link",
}
_KINDS = ("data", "garbage", "compute")
NOTABLE_SHARE, NOTABLE_RATIO = 0.02, 1.1
"""A straggler costs at least this share of the time, and is this many times slower than the median."""


def measure(
    timeline: Timeline, settings: Mapping[str, Any], network: Mapping[str, Any] | None = None
) -> dict[str, Any] | None:
    """What `summary.json` says of stragglers; None where there were not two workers to compare.

    `lost_seconds` is in all, and `share` that of the workers' time. `workers` has of each: `lost_seconds`;
    `seconds_per_step`, its own; `samples_per_step`; `slower`, its own seconds per sample (per step in pipelines)
    as a multiple of its peers' median; `excess`, seconds per step that it has more than they, by cause; `cause`, the
    largest. `found` names the workers that count as stragglers, the most expensive first. `shares` says, where these
    go by speed, how often they changed, and the `samples` of each worker at last.

    Args:
        timeline: the run's.
        settings: its job as plain values.
        network: what `links.network` found, if the run was on several hosts.
    """
    lost: dict[Who, float] = defaultdict(float)
    generations: dict[int, list[Life]] = defaultdict(list)
    for life in timeline.lives:
        generations[life.journal.generation].append(life)
    newest: list[OwnTime] = []
    for generation in sorted(generations):
        workers = own_times(generations[generation])
        if len(workers) > 1:
            newest = workers
            for who, seconds in _losses(workers, settings):
                lost[who] += seconds
    if not newest:
        return None
    total = timeline.seconds["total"] - timeline.seconds["start"]
    rows = [_row(worker, newest, lost[worker.life.who]) for worker in newest]
    _blame_links(rows, newest, network, timeline)
    found = sorted(
        (row for row in rows if row["cause"] is not None and row["lost_seconds"] > NOTABLE_SHARE * max(total, 1e-9)),
        key=lambda row: -float(row["lost_seconds"]),
    )
    every = sum(lost.values())
    return {
        "lost_seconds": round(every, 6),
        "share": round(every / total, 6) if total > 0 else None,
        "found": [{key: row[key] for key in ("island", "rank", "lost_seconds", "slower", "cause")} for row in found],
        "workers": rows,
        "shares": _shares(timeline),
        "how": HOW,
    }


def named(row: Mapping[str, Any]) -> str:
    """`worker 1`, of one of `workers` or `found`."""
    return f"worker {row['rank']}" + (f" of island {row['island']}" if row["island"] else "")


def _shares(timeline: Timeline) -> dict[str, Any] | None:
    events = (event for life in timeline.lives for event in life.journal.events if event["name"] == "shares")
    changes = [event for event in events if _sound(event)]
    last = max(changes, key=lambda event: float(event["wall"]), default=None)
    return {"changes": len(changes), "samples": last["samples"]} if last is not None else None


def _sound(event: Mapping[str, Any]) -> bool:
    samples = event.get("samples")
    whole = isinstance(samples, list) and all(type(count) is int for count in samples)
    return whole and type(event.get("wall")) in (int, float)


# -- what was lost -------------------------------------------------------------------------------------------


def _losses(workers: Sequence[OwnTime], settings: Mapping[str, Any]) -> Iterator[tuple[Who, float]]:
    """Seconds that a generation lost to its workers."""
    strategy = settings.get("strategy")
    strategy = strategy if isinstance(strategy, Mapping) else {}
    islands, exchange = strategy.get("islands", 1), strategy.get("exchange", {})
    exchange = exchange if isinstance(exchange, Mapping) else {"name": exchange}
    alone = exchange.get("name") in ("local_sgd", "diloco")
    count = islands if isinstance(islands, int) and islands > 0 and len(workers) % islands == 0 else 1
    # Those that come together in every step; islands are the slowest axis.
    together = [workers]
    if count > 1 and (alone or exchange.get("consistency") == "asynchronous"):
        size = len(workers) // count
        together = [workers[first : first + size] for first in range(0, len(workers), size)]
    found = eras(worker.life.journal for worker in workers)
    for members in together:
        steps, own = _side_by_side(members)
        yield from _charged(members, own, factors(steps, found))
    if alone and len(together) > 1:
        steps = np.unique(np.concatenate([worker.steps for worker in workers]))
        rounds, factor = _rounds(workers[0], steps), factors(steps, found)
        slowest = [max(members, key=lambda worker: float(worker.own.sum())) for members in together]
        each = [np.nan_to_num(_at(members, steps)).max(axis=0) * factor for members in together]
        own = np.stack([np.bincount(rounds, seconds).astype(np.float64) for seconds in each])
        yield from _charged(slowest, own, np.ones(own.shape[1]))


def _side_by_side(workers: Sequence[OwnTime]) -> tuple[Ints, Floats]:
    """The steps that any of them did, and `own` of each in each, NaN where it took no part; shape [workers, steps]."""
    steps = np.unique(np.concatenate([worker.steps for worker in workers]))
    return steps, _at(workers, steps)


def _at(workers: Sequence[OwnTime], steps: Ints) -> Floats:
    own = np.full((len(workers), len(steps)), np.nan)
    for row, worker in zip(own, workers, strict=True):
        row[np.searchsorted(steps, worker.steps)] = worker.own
    return own


def _charged(workers: Sequence[OwnTime], own: Floats, factor: Floats) -> Iterator[tuple[Who, float]]:
    """What each lost the others.

    Args:
        own: seconds, shape [workers, steps]; NaN where one took no part.
        factor: how many steps each of those stands for.
    """
    several = np.isfinite(own).sum(axis=0) > 1
    own, factor = own[:, several], factor[several]
    if not own.shape[1]:
        return
    middle = (np.isfinite(own).sum(axis=0) - 1) // 2
    median = np.take_along_axis(np.sort(own, axis=0), middle[np.newaxis], axis=0)[0]  # NaN comes last
    late = (np.nanmax(own, axis=0) - median) * factor
    for number, seconds in enumerate(np.bincount(np.nanargmax(own, axis=0), late, minlength=len(workers)).tolist()):
        yield workers[number].life.who, seconds


def _rounds(worker: OwnTime, steps: Ints) -> Ints:
    """For each step the number of exchanges between islands before it: one that is recorded with step n came after n
    steps, and so before the step n."""
    collectives = worker.life.journal.collectives
    number = collectives[:, 1] & ((1 << PART_BITS) - 1)
    found: Ints = np.searchsorted(np.unique(collectives[number >= EXCHANGES, 0]), steps, side="right")
    return found


# -- why -----------------------------------------------------------------------------------------------------


def _row(worker: OwnTime, workers: Sequence[OwnTime], lost: float) -> dict[str, Any]:
    """What the summary says of one worker of the newest generation."""
    others = [other for other in workers if other is not worker]
    alike = [other for other in others if other.stage == worker.stage]
    peers = alike or others
    excess = _excess(worker, peers)
    if not alike:
        excess = {"stage": sum(excess.values())}
    excess = {cause: seconds for cause, seconds in excess.items() if seconds > 0}
    if alike and all(each.samples.any() for each in (worker, *peers)):
        pace, usual = worker.seconds_per_sample, _low([peer.seconds_per_sample for peer in peers])
    else:
        pace, usual = worker.mean("own"), _low([peer.mean("own") for peer in peers])
    behind = worker.mean("own") > NOTABLE_RATIO * _low([peer.mean("own") for peer in peers])
    return {
        "island": worker.life.journal.island,
        "rank": worker.life.journal.rank,
        "lost_seconds": round(lost, 6),
        "seconds_per_step": round(worker.mean("own"), 9),
        "samples_per_step": round(worker.mean("samples"), 6) if worker.samples.any() else None,
        "slower": round(pace / usual, 4) if usual > 0 else None,
        "excess": {cause: round(seconds, 9) for cause, seconds in excess.items()},
        "cause": max(excess, key=lambda cause: excess[cause]) if excess and behind else None,
    }


def _excess(worker: OwnTime, peers: Sequence[OwnTime]) -> dict[str, float]:
    """Seconds per step that a worker has more than its peers' median, by cause; some may be negative."""
    usual = {kind: _low([peer.mean(kind) for peer in peers]) for kind in (*_KINDS, "samples", "weights")}
    more = {kind: worker.mean(kind) - usual[kind] for kind in _KINDS}
    by_more = 0.0
    if more["compute"] > 0:
        ratios = (worker.mean(key) / usual[key] for key in ("samples", "weights") if usual[key] > 0)
        # More samples do not take more than in proportion; what is beyond that the worker is slow by.
        by_more = min(max(usual["compute"] * (max(ratios, default=1.0) - 1.0), 0.0), more["compute"])
    more["compute"] -= by_more
    return {**more, "samples": by_more}


def _blame_links(
    rows: list[dict[str, Any]], workers: Sequence[OwnTime], network: Mapping[str, Any] | None, timeline: Timeline
) -> None:
    """Names the workers of a host whose links are much slower than others' as what the rest waits for, where much of
    the time goes into communicating: what a collective takes is what its slowest link does."""
    if network is None:
        return
    rates: dict[str, float] = {}
    for link in network["links"]:
        for host in (link["from"], link["to"]):
            rates[host] = max(rates.get(host, 0.0), float(link["bandwidth"]))
    if len(rates) < 3 or min(rates.values()) <= 0:
        return  # of two hosts both ends have the same link
    slowest = min(rates, key=lambda host: rates[host])
    usual = _low([rate for host, rate in rates.items() if host != slowest])
    seconds = timeline.seconds
    if rates[slowest] * 2 > usual or seconds["communicate"] < 0.1 * (seconds["total"] - seconds["start"]):
        return
    waited = 0.0 if timeline.wait_measured else sum(row["lost_seconds"] for row in rows)
    spent = max(seconds["communicate"] - waited, 0.0) * (1 - rates[slowest] / usual)
    mine = [row for row, worker in zip(rows, workers, strict=True) if worker.life.journal.address == slowest]
    for row in mine:
        row["excess"]["link"] = round(spent / max(len(workers[0].steps), 1), 9)
        row["lost_seconds"] = round(row["lost_seconds"] + spent / len(mine), 6)
        row["cause"] = max(row["excess"], key=lambda key: row["excess"][key])


def _low(values: Sequence[float]) -> float:
    """The lower median."""
    return sorted(values)[(len(values) - 1) // 2]
