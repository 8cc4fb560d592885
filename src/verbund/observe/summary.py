"""The summary of a run, `summary.json`, from its journals. No torch.

Fields are added over time, never renamed. A value that was not measured is None, and `not_measured` says why.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from verbund.observe import membership, privacy, rounds, servers, statistics, stragglers
from verbund.observe.compression import measure as measure_compression
from verbund.observe.compression import measure_exchange
from verbund.observe.directions import best, larger_is_better
from verbund.observe.energy import NOT_MEASURED
from verbund.observe.journal import Floats, ProcessJournal, read
from verbund.observe.links import network
from verbund.observe.pipeline import measure, pipelines
from verbund.observe.timeline import KINDS, Timeline, merge
from verbund.observe.verdict import held_back
from verbund.plain_json import finite

CURVE_POINTS = 2000
_HOW = "payload bytes of the processes' TCP connections, counted by the kernel"
TRACE_LIMIT = 20_000


def summarise(
    run_dir: Path,
    *,
    status: str,
    cause: Mapping[str, Any] | None = None,
    strategy: Mapping[str, Any] | None = None,
    world: int | None = None,
    ended_by: str | None = None,
    whole_curves: bool = False,
    trained: Mapping[str, Any] | None = None,
    journals: Sequence[ProcessJournal] | None = None,
    timeline: Timeline | None = None,
) -> dict[str, Any]:
    """The fields of `summary.json`, all of them JSON values.

    Args:
        run_dir: the run; its `journal/` is read, and `job.toml` for advice.
        status: `done`, `failed`, `interrupted`, `running`.
        cause: the record of the error that ended the run.
        strategy: the job's, as plain values.
        world: the number of workers; default: how many the newest generation's journals show.
        ended_by: which of the training's ends was reached.
        whole_curves: keep all points of the curves; otherwise at most `CURVE_POINTS`, the first and last
            among them.
        trained: the `steps`, `samples` and `samples_lost` that the workers have counted, if they came to their end.
        journals, timeline: if they were read already.

    `samples` are those of all steps done, and `samples_lost` those of them that nothing was learnt from, as an island
    that trained alone was left out with them. `steps` is the number of optimiser steps done, also of those that no
    journal has; in `loss.curve` a step's number is that of its ticket, from 0. `metrics[NAME].curve` counts the steps
    done before the validation. `seconds` are means over the workers that add up to `total`. `samples_per_second` leaves
    out starting and validating. `pipeline`
    is as `pipeline.measure` says, and None where there was none; so is `network` as `links.network` says.
    `memory_promise` says per worker which bytes of the model's state it held, and their share of what one process
    alone would hold. `compression` and `exchange` are as `observe.compression` says, `servers`, `membership`,
    `rounds`, `privacy`, `statistics` and `stragglers` as the modules of these names do.
    """
    journals = read(run_dir / "journal") if journals is None else journals
    timeline = merge(journals) if timeline is None else timeline
    settings = read_settings(run_dir)
    steps = valid_steps(journals)
    speed = _speed(journals, timeline)
    found = pipelines(journals)
    pipeline = measure(found, speed) if found else None
    between = network(journals, timeline)
    workers = [j for j in journals if j.role == "worker"]
    generations = sorted({j.generation for j in journals})
    recorded = {"steps": int(steps[-1, 0]) + 1 if len(steps) else 0, "samples": int(steps[:, 3].sum())}
    done = {key: max(count, int((trained or {}).get(key) or 0)) for key, count in recorded.items()}
    lost = _samples_lost(journals, trained or {})
    summary: dict[str, Any] = {
        "status": status,
        "run": str(run_dir.resolve()),
        "cause": dict(cause) if cause else None,
        "ended_by": ended_by,
        "strategy": dict(strategy or {}),
        "world": world if world is not None else len({j.rank for j in workers if j.generation == generations[-1]}),
        "generations": len(generations),
        **done,
        "samples_lost": lost,
        "loss": _loss(steps, whole_curves),
        "metrics": _metrics(journals, whole_curves),
        "seconds": _seconds(timeline),
        "workers": _workers(timeline),
        "bytes": _bytes(journals),
        "network": between,
        "samples_per_second": speed,
        "pipeline": pipeline,
        "compression": measure_compression(journals),
        "exchange": measure_exchange(journals),
        "servers": servers.measure(journals),
        "stragglers": stragglers.measure(timeline, settings, between),
        "membership": membership.measure(journals),
        "rounds": rounds.measure(journals),
        "privacy": privacy.measure(journals),
        "statistics": statistics.measure(journals, settings),
        "peak_memory_bytes": _memory(journals),
        "memory_promise": _promise(journals),
        "energy": _energy(journals),
        "held_back": held_back(timeline, settings, pipeline, between),
        "checkpoints": _checkpoints(journals),
        "failures": failures(journals),
        "notes": notes(journals),
        "not_measured": [
            *_not_recorded(done, recorded, len(steps), lost),
            *_not_measured(journals, timeline, pipeline),
        ],
    }
    clean: dict[str, Any] = finite(summary)
    return clean


def read_settings(run_dir: Path) -> dict[str, Any]:
    """The run's job as plain values; empty if it cannot be read, which only costs some advice."""
    try:
        return tomllib.loads((run_dir / "job.toml").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        return {}


# -- what was learnt -----------------------------------------------------------------------------------------


def valid_steps(journals: Sequence[ProcessJournal]) -> Floats:
    """The steps that led to the model as it is, in order: shape [steps, 5]. What an earlier generation did
    beyond the step at which a later one went on was lost, and is left out."""
    parts: list[Floats] = []
    limit = math.inf
    joint = {
        j.generation
        for j in journals
        for event in j.events
        if event["name"] == "membership" and event.get("joint") is True
    }
    whole = {j.generation for j, event in events(journals, "tickets") if event.get("whole") is True}
    for generation in sorted({j.generation for j in journals}, reverse=True):
        mine = [j for j in journals if j.generation == generation and len(j.steps)]
        if generation in whole:  # who does a lost one's ticket again records it later than that was last heard of
            mine.sort(key=lambda j: j.last_heard)
        leaders: dict[int, list[Floats]] = {}
        for journal in mine:
            one = generation in joint or generation in whole
            leaders.setdefault(0 if one else journal.rank, []).append(journal.steps)
        if not leaders:
            continue
        steps = _added(np.concatenate([_once(np.concatenate(rows)) for rows in leaders.values()]))
        steps = steps[steps[:, 0] < min(limit, _ended(journals, generation))]
        if len(steps):
            limit = float(steps[0, 0])
            parts.append(steps)
    return np.concatenate(parts[::-1]) if parts else np.empty((0, 5))


def _ended(journals: Sequence[ProcessJournal], generation: int) -> float:
    """How many steps were done when a generation ended, if it says so: members may have gone back from later ones."""
    stops = [e for j, e in events(journals, "stopped") if j.generation == generation]
    return min((float(e["steps"]) for e in stops if isinstance(e.get("steps"), int)), default=math.inf)


def _once(rows: Floats) -> Floats:
    """Who takes the place of the worker that journals an island's steps records the last ones again, and so does an
    island that is given a lost one's whole tickets: each once, as it was first, in order."""
    return rows[np.unique(rows[:, 0], return_index=True)[1]]


def _added(rows: Floats) -> Floats:
    """Islands that train alone record their own samples' loss: the steps of all of them, each once, in order."""
    steps, number = np.unique(rows[:, 0], return_inverse=True)
    if len(steps) == len(rows):
        return rows[np.argsort(rows[:, 0])]
    added = np.zeros((len(steps), rows.shape[1]))
    added[:, 0] = steps
    # Who had no sample of a step has no loss of it either.
    np.add.at(added[:, 1], number, np.where(rows[:, 2] > 0, rows[:, 1] * rows[:, 2], 0.0))
    np.add.at(added[:, 2], number, rows[:, 2])
    np.add.at(added[:, 3], number, rows[:, 3])
    np.maximum.at(added[:, 4], number, rows[:, 4])
    with np.errstate(invalid="ignore", divide="ignore"):
        added[:, 1] /= added[:, 2]
    return added


def validations(journals: Sequence[ProcessJournal]) -> list[tuple[int, dict[str, Any], float]]:
    """The validations that hold, in order: steps done before it, metrics, seconds since the epoch."""
    begins: dict[int, int] = {}
    for journal in journals:
        if len(journal.steps):
            first = int(journal.steps[0, 0])
            begins[journal.generation] = min(first, begins.get(journal.generation, first))
    found: dict[int, tuple[int, dict[str, Any], float]] = {}
    for journal in sorted(journals, key=lambda j: j.generation):
        lost_from = min((first for g, first in begins.items() if g > journal.generation), default=math.inf)
        for event in journal.events:
            step, metrics = event.get("step"), event.get("metrics")
            if event["name"] != "validation" or type(step) is not int or not isinstance(metrics, dict):
                continue
            if step <= lost_from:
                found[step] = (step, metrics, _wall(event))
    return [found[step] for step in sorted(found)]


def thin(points: list[list[Any]], limit: int = CURVE_POINTS) -> tuple[list[list[Any]], int]:
    """At most `limit` of the points, evenly, the first and last among them; and the stride."""
    if len(points) <= limit:
        return points, 1
    stride = math.ceil((len(points) - 1) / (limit - 1))
    kept = points[::stride]
    if kept[-1] is not points[-1]:
        kept.append(points[-1])
    return kept, stride


def _loss(steps: Floats, whole: bool) -> dict[str, Any]:
    curve: list[list[Any]] = [[int(step), loss] for step, loss in steps[:, :2].tolist()]
    first, last = (curve[0][1], curve[-1][1]) if curve else (None, None)
    kept, stride = (curve, 1) if whole else thin(curve)
    return {"first": first, "last": last, "curve": kept, "curve_stride": stride}


def _metrics(journals: Sequence[ProcessJournal], whole: bool) -> dict[str, Any]:
    curves: dict[str, list[list[Any]]] = {}
    last: dict[str, Any] = {}
    for step, metrics, _ in validations(journals):
        for name, value in metrics.items():
            last[name] = value
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                curves.setdefault(name, []).append([step, value])
    result = {}
    for name, value in last.items():
        curve = curves.get(name, [])
        kept, stride = (curve, 1) if whole else thin(curve)
        result[name] = {
            "last": value,
            "best": best(name, (v for _, v in curve)),
            "better": "larger" if larger_is_better(name) else "smaller",
            "curve": kept,
            "curve_stride": stride,
        }
        if not curve:  # a confusion matrix and the like
            del result[name]["better"]
    return result


# -- what it cost --------------------------------------------------------------------------------------------


def _seconds(timeline: Timeline) -> dict[str, float | None]:
    seconds: dict[str, float | None] = {k: round(v, 6) for k, v in timeline.seconds.items()}
    if not timeline.wait_measured:
        seconds["wait"] = None
    return seconds


def _workers(timeline: Timeline) -> list[dict[str, Any]]:
    return [
        {
            "island": island,
            "rank": rank,
            "steps": int(sums["steps"]),
            "seconds": {kind: round(sums[kind], 6) for kind in ("total", *KINDS)},
            "others_waited": round(timeline.caused[island, rank], 6) if timeline.wait_measured else None,
        }
        for (island, rank), sums in timeline.workers.items()
    ]


def _bytes(journals: Sequence[ProcessJournal]) -> dict[str, Any]:
    per_process: dict[str, dict[str, Any]] = {}
    for journal in journals:
        if journal.links is None:
            continue
        mine = per_process.setdefault(journal.name, {"sent": 0, "received": 0, "peers": {}})
        for peer, (sent, received) in journal.links.items():
            mine["sent"] += sent
            mine["received"] += received
            before = mine["peers"].setdefault(peer, [0, 0])
            mine["peers"][peer] = [before[0] + sent, before[1] + received]
    measured = bool(per_process)
    return {
        "sent": sum(p["sent"] for p in per_process.values()) if measured else None,
        "received": sum(p["received"] for p in per_process.values()) if measured else None,
        "shared": sum(j.shared_bytes or 0 for j in journals) if measured else None,
        "how": _HOW if measured else "not measured",
        "per_process": per_process,
    }


def _speed(journals: Sequence[ProcessJournal], timeline: Timeline) -> float | None:
    seconds = timeline.seconds
    steady = seconds["total"] - seconds["start"] - seconds["validate"]
    samples = sum(float(j.steps[:, 3].sum()) for j in journals)  # also of lost steps: they were work
    return round(samples / steady, 3) if steady > 0 and samples else None


def _memory(journals: Sequence[ProcessJournal]) -> dict[str, int | None]:
    peaks: dict[str, int | None] = {}
    for journal in journals:
        if journal.role == "worker" or journal.peak_bytes is not None:
            known = [p for p in (peaks.get(journal.name), journal.peak_bytes) if p is not None]
            peaks[journal.name] = max(known, default=None)
    return peaks


def _promise(journals: Sequence[ProcessJournal]) -> dict[str, Any] | None:
    """Of the newest generation that said what it held."""
    saying = [j for j in journals if j.role == "worker" and j.held]
    newest = [j for j in saying if j.generation == saying[-1].generation]
    if not newest:
        return None
    workers: dict[str, dict[str, Any]] = {}
    whole = max((j.held or {}).get("whole", 0) for j in newest) or None
    for journal in newest:
        held = {kind: count for kind, count in (journal.held or {}).items() if kind != "whole"}
        total = sum(held.values())
        share = round(total / whole, 6) if whole else None
        workers[journal.name] = {"held": held, "total": total, "share": share, "peak": journal.peak_bytes}
    return {"whole": whole, "workers": workers}


def _energy(journals: Sequence[ProcessJournal]) -> dict[str, Any]:
    measured = [j.joules for j in journals if j.joules is not None]
    if not measured:
        return {"joules": None, "how": NOT_MEASURED}
    return {
        "joules": sum(value for value, _ in measured),
        "how": "; ".join(sorted({how for _, how in measured})),
    }


# -- what happened -------------------------------------------------------------------------------------------


def events(journals: Sequence[ProcessJournal], name: str) -> list[tuple[ProcessJournal, dict[str, Any]]]:
    """All events of a name with who wrote them, in the order of the starts of the run and of their time; a clock may
    have been set back between two starts."""
    found = [(j, event) for j in journals for event in j.events if event["name"] == name]
    return sorted(found, key=lambda pair: (pair[0].generation, _wall(pair[1])))


def failures(journals: Sequence[ProcessJournal], traces: bool = False) -> list[dict[str, Any]]:
    """The failures of all generations, in the order of their time; with tracebacks if asked for."""
    result = []
    for journal, event in events(journals, "failure"):
        error = event.get("error")
        failure = {
            "process": str(event.get("process", journal.name)),
            "generation": journal.generation,
            "time": _wall(event),
            "error": error if isinstance(error, dict) else {"what": str(error)},
            "secondary": bool(event.get("secondary", False)),
        }
        if traces and event.get("trace"):
            failure["trace"] = str(event["trace"])[-TRACE_LIMIT:]
        result.append(failure)
    for journal, event in events(journals, "checkpoint_failed"):
        failure = {
            "process": journal.name,
            "generation": journal.generation,
            "time": _wall(event),
            "error": {"what": f"the checkpoint of step {event.get('step')} failed: {event.get('failure')}"},
            "secondary": False,
        }
        result.append(failure)
    return sorted(result, key=lambda f: (f["generation"], float(f["time"])))


def notes(journals: Sequence[ProcessJournal]) -> list[str]:
    """What processes noted for the report, each text once; of a mesh only what was noted of the newest."""
    newest = max((journal.generation for journal in journals), default=0)
    found = [e for j, e in events(journals, "note") if j.generation == newest or not e.get("mesh")]
    return list(dict.fromkeys(str(event.get("text", "")) for event in found))


def _checkpoints(journals: Sequence[ProcessJournal]) -> dict[str, Any]:
    saved = [event for _, event in events(journals, "checkpoint")]
    return {
        "saved": len(saved),
        "failed": len(events(journals, "checkpoint_failed")),
        "last_step": saved[-1].get("step") if saved else None,
        "last_bytes": saved[-1].get("bytes") if saved else None,
    }


def _samples_lost(journals: Sequence[ProcessJournal], trained: Mapping[str, Any]) -> int:
    """As the workers have counted them, or by what they have told so far."""
    if (counted := trained.get("samples_lost")) is not None:
        return int(counted)
    return sum(int(event.get("samples_lost") or 0) for _, event in events(journals, "islands"))


def _not_recorded(done: Mapping[str, int], recorded: Mapping[str, int], rows: int, gone: int) -> list[str]:
    """Which of the steps done the journals lack, besides those of `gone` samples at most whose island was left out."""
    counted = (
        "samples are as the workers counted them" if done["samples"] > recorded["samples"] else "and so do the samples"
    )
    if lost := done["steps"] - rows:
        what = f"{lost} of {done['steps']} steps were not recorded (no space left?)"
        return [f"{what}: the loss and its curve lack them; {counted}."]
    if (lost := done["samples"] - recorded["samples"]) > gone:
        return [f"The loss of {lost} of {done['samples']} samples was not recorded (no space left?)."]
    return []


def _not_measured(
    journals: Sequence[ProcessJournal], timeline: Timeline, pipeline: Mapping[str, Any] | None
) -> list[str]:
    """What the numbers do not say, in sentences."""
    found = []
    workers = [j for j in journals if j.role == "worker"]
    if not workers:
        return ["Seconds, bytes and memory: no worker's journal was found."]
    if not timeline.wait_measured:
        found.append(
            "Waiting: the workers' hosts have clocks of their own; it is contained in the seconds communicating."
        )
    if pipeline and pipeline["bubble"]["measured"] is None:
        found.append("The pipeline's bubble: no step was recorded whole, by workers whose clocks can be compared.")
    if missing := [j.name for j in workers if j.links is None]:
        found.append(f"Bytes of {_names(missing)}: the kernel's counters were not read.")
    if missing := [j.name for j in workers if j.peak_bytes is None]:
        found.append(f"Memory of {_names(missing)}.")
    if not any(j.joules for j in journals):
        found.append("Energy: no readable counter, or none was read.")
    if timeline.estimated:
        found.append(
            "Seconds are an estimate: a journal reached its limit (`observe.journal_mb`), after which only "
            "some of the steps were recorded; the others count as being like them."
        )
    blocked = sum(life.seconds["wait"] + life.seconds["communicate"] for life in timeline.lives)
    if timeline.wait_measured and timeline.unsplit > 0.01 * max(blocked, 1e-9):
        share = 100 * min(timeline.unsplit / max(blocked, 1e-9), 1.0)
        found.append(
            f"{share:.0f} % of the time in collectives and messages could not be divided into waiting and "
            "communicating, since not all workers recorded them; it counts as communicating."
        )
    if open_ := [j.name for j in workers if not j.ended]:
        found.append(f"The end of {_names(open_)}: the journal was not closed (the process was killed, or runs on).")
    if torn := [j.name for j in journals if j.damaged > (0 if j.ended else 1)]:
        found.append(f"Some lines of the journal of {_names(torn)} could not be read.")
    if large := [j.name for j in journals if j.truncated]:
        found.append(f"The rest of the journal of {_names(large)}: the file is larger than what is read.")
    if lost := sum(int(event.get("lines", 0)) for _, event in events(journals, "dropped")):
        found.append(f"{lost} lines of the journals could not be written (no space left?).")
    return found


def _names(names: Sequence[str]) -> str:
    unique = list(dict.fromkeys(names))
    return ", ".join(unique[:4]) + (f" and {len(unique) - 4} more" if len(unique) > 4 else "")


def _wall(event: Mapping[str, Any]) -> float:
    wall = event.get("wall")
    return float(wall) if isinstance(wall, (int, float)) and not isinstance(wall, bool) else 0.0
