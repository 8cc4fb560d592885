"""What held a run back, in words: sentences from the timeline, the weightiest first. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verbund.observe.links import fullest
from verbund.observe.progress import duration
from verbund.observe.timeline import Timeline, Who

_DOING = {
    "compute": "computing",
    "data": "waiting for data",
    "checkpoint": "saving checkpoints",
    "validate": "validating",
    "start": "starting",
    "idle": "doing what no span describes",
    "communicate": "communicating",
}
_NOTABLE = {"wait": 0.05, "data": 0.05, "communicate": 0.1, "checkpoint": 0.05, "validate": 0.2, "start": 0.2,
            "idle": 0.1}  # fmt: skip
_HELD_BY_LINK = 0.2


def held_back(
    timeline: Timeline,
    settings: Mapping[str, Any],
    pipeline: Mapping[str, Any] | None = None,
    network: Mapping[str, Any] | None = None,
) -> list[str]:
    """Sentences on where the workers' time went that was not computing, the largest share first, each with
    what to do about it.

    Args:
        timeline: the run's.
        settings: the run's job as plain values; defaults are taken where it says nothing.
        pipeline: what `pipeline.measure` found, if there was one.
        network: what `links.network` found of a run over several hosts.
    """
    seconds = timeline.seconds
    total = seconds["total"]
    if not timeline.lives or total <= 0:
        return ["No worker's journal was found: where the time went was not measured."]
    shares = {kind: seconds[kind] / total for kind in ("compute", *_NOTABLE)}
    found = [(share, kind) for kind, share in shares.items() if kind in _NOTABLE and share >= _NOTABLE[kind]]
    several = len(timeline.workers) > 1
    sentences = [
        _sentence(kind, share, timeline, settings, pipeline, network) for share, kind in sorted(found, reverse=True)
    ]
    busy = shares["compute"] / max(1.0 - shares["start"], 1e-9)
    if busy >= 0.85:
        gain = "nothing to gain from the network or the data" if several else "more workers, or fewer computations"
        after = " after the start" if "start" in {kind for _, kind in found} else ""
        sentences.append(
            f"Computing is {_percent(busy)} of the workers' time{after}: "
            + (f"{gain}." if several else f"only {gain} would make the run shorter.")
        )
    elif not sentences:
        sentences.append(
            f"Nothing stands out: {_percent(shares['compute'])} of the workers' time went into computing, "
            "and no other kind took a notable share."
        )
    return sentences


def _sentence(
    kind: str,
    share: float,
    timeline: Timeline,
    settings: Mapping[str, Any],
    pipeline: Mapping[str, Any] | None,
    network: Mapping[str, Any] | None,
) -> str:
    of = f"{_percent(share)} of the workers' time went into"
    if kind == "wait" and pipeline and pipeline["bubble"]["measured"] is not None:
        return f"{of} waiting. {_bubble(pipeline)}"
    if kind == "wait":
        return f"{of} {_waiting(timeline, settings)}"
    if kind == "data":
        return f"{of} waiting for data: {_data_advice(settings)}."
    if kind == "communicate" and share >= _HELD_BY_LINK and network and (full := fullest(network)) is not None:
        return f"{of} {_link(full[0], settings)}"
    if kind == "communicate":
        return f"{of} {_communicating(timeline, settings)}"
    if kind == "checkpoint":
        every = _get(settings, "checkpoint", "every", "epoch")
        return f"{of} saving checkpoints: raise `checkpoint.every` (now {every})."
    if kind == "validate":
        every = _get(settings, "validate", "every", "epoch")
        return f"{of} validating: raise `validate.every` (now {every})."
    if kind == "start":
        start = timeline.seconds["start"]
        long = f"{start:.1f} s" if start < 10.0 else duration(start)
        return f"{of} starting ({long} until the first step): the run is short, a longer one starts no slower."
    return f"{of} what no span describes: time between the steps, or a machine shared with others."


def _waiting(timeline: Timeline, settings: Mapping[str, Any]) -> str:
    caused = {who: seconds for who, seconds in timeline.caused.items() if seconds > 0}
    total = sum(caused.values())
    many = len(timeline.workers)
    if not caused:
        return "waiting for one another."
    who = max(caused, key=lambda w: caused[w])
    share = caused[who] / total
    if share < (0.6 if many == 2 else 1.5 / many):
        return (
            f"waiting for one another, for no worker in particular ({name(who)} came last for "
            f"{_percent(share)} of it): the steps take uneven times. Are there fewer cores than workers and "
            "their threads?"
        )
    mostly = "" if share > 0.95 else f" ({_percent(share)} of it)"
    kind, more = _excess(timeline, who)
    advice = ""
    if kind == "compute" and _name(_get(settings, "strategy", "stragglers", "none")) == "none":
        advice = '; with `strategy.stragglers = "rebalance"` it would have fewer samples'
    return f"waiting for {name(who)}{mostly}{more}{advice}."


def _bubble(pipeline: Mapping[str, Any]) -> str:
    """Why workers of a pipeline are idle: the schedule, stages of uneven lengths, or messages and all else."""
    bubble, times = pipeline["bubble"], [sum(stage.values()) for stage in pipeline["stage_seconds"]]
    idle = f"In the pipeline, {pipeline['ranks']} workers are idle for {_percent(bubble['measured'])} of a step"
    by_schedule, by_stages = bubble["equal_stages"], bubble["theory"]
    if by_schedule is None or by_stages is None:
        return f"{idle}."
    many = f"{pipeline['micro_batches']} micro-batches"
    said = f"{idle}; `{pipeline['schedule']}` with {many} brings {_percent(by_schedule)}"
    uneven, rest = by_stages - by_schedule, bubble["measured"] - by_stages
    if by_schedule >= max(uneven, rest):
        return f"{said}. More micro-batches of fewer samples, or fewer stages, make it less."
    if uneven >= rest:
        slowest = max(range(len(times)), key=lambda stage: times[stage])
        ratio = times[slowest] * len(times) / max(sum(times), 1e-12)
        return (
            f"{said}, and most of the rest comes from uneven stages: stage {slowest} takes {ratio:.1f} times the mean. "
            "Move layers from it to others."
        )
    return (
        f"{said}, and most of the rest comes from messages and from passes of uneven times. Are there fewer cores than "
        "workers and their threads?"
    )


def _excess(timeline: Timeline, who: Who) -> tuple[str, str]:
    """On what the worker spent more than the others, and how much per 100 steps."""
    workers = timeline.workers
    mine = workers[who]
    others = [seconds for other, seconds in workers.items() if other != who and seconds["steps"]]
    if not others or not mine["steps"]:
        return "", ""
    more = {
        kind: 100 * (mine[kind] / mine["steps"] - sum(o[kind] / o["steps"] for o in others) / len(others))
        for kind in _DOING
        if kind not in ("communicate", "start")
    }
    kind = max(more, key=lambda k: more[k])
    if more[kind] <= 0:
        return "", ""
    return kind, f", which spent {_seconds(more[kind])} more per 100 steps {_DOING[kind]}"


def _link(link: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """That a link was near its limit, and what sends fewer bytes over it."""
    rate, limit = (8e-6 * link[key] for key in ("rate", "bandwidth"))
    ways = []
    if _name(_get(settings, "strategy", "exchange", "all_reduce")) == "all_reduce":
        ways.append('`exchange = "diloco"` with an island on each host')
    if _name(_get(settings, "strategy", "compression", None)) == "none":
        ways.append('`compression = "power_sgd"`')
    would = f"; {' or '.join(ways)} would send fewer bytes" if ways else ""
    return (
        f"waiting for the link from {link['from']} to {link['to']}, which was near its limit ({rate:.3g} of "
        f"{limit:.3g} Mbit/s){would}."
    )


def _name(section: Any) -> Any:
    """The name of what a section of a job, or a bare value in its place, stands for."""
    return section.get("name") if isinstance(section, Mapping) else section


def _communicating(timeline: Timeline, settings: Mapping[str, Any]) -> str:
    seconds = timeline.seconds
    steps = max((w["steps"] for w in timeline.workers.values()), default=0.0)
    each = f" ({_seconds(seconds['communicate'] / steps)} a step)" if steps else ""
    exchange = _get(settings, "strategy", "exchange", "all_reduce")
    if _name(exchange) == "parameter_server":
        said = "pulling from the servers and pushing to them"
        advice = "A larger `train.global_batch` (which changes the training) makes it a smaller share"
        if isinstance(exchange, Mapping) and exchange.get("consistency", "bulk_synchronous") != "asynchronous":
            said += ", and waiting there for other islands"
            advice += '; with `consistency = "asynchronous"` (whose numbers are others) nobody waits'
        return f"{said}{each}. {advice}."
    if not timeline.wait_measured:
        return (
            f"communicating and waiting{each}; the two cannot be told apart here, since the workers' hosts "
            "have clocks of their own."
        )
    return (
        f"communicating{each}. Fewer workers, or a larger `train.global_batch` (which changes the training), make it "
        "a smaller share; a faster network makes it shorter."
    )


def _data_advice(settings: Mapping[str, Any]) -> str:
    loaders = _get(settings, "data", "loaders", 0)
    if not loaders:
        return "set `data.loaders` (now 0: one thread of the worker reads ahead)"
    prefetch = _get(settings, "data", "prefetch", 2)
    return f"raise `data.loaders` (now {loaders}) or `data.prefetch` (now {prefetch})"


def name(who: Who) -> str:
    """`worker 1`, or with its island where there are several."""
    island, rank = who
    return f"worker {rank}" if island == 0 else f"worker {rank} of island {island}"


def _get(settings: Mapping[str, Any], section: str, key: str, default: Any) -> Any:
    inner = settings.get(section)
    return inner.get(key, default) if isinstance(inner, Mapping) else default


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.095 else f"{100 * share:.1f} %"


def _seconds(value: float) -> str:
    if value >= 10:
        return f"{value:.0f} s"
    if value >= 0.1:
        return f"{value:.1f} s"
    return f"{value * 1e3:.1f} ms" if value >= 1e-4 else f"{value * 1e6:.0f} µs"
