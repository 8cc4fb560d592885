"""What the parts of a report say."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import tomli_w

from verbund.errors import from_record
from verbund.observe.journal import HELD
from verbund.observe.report import lanes
from verbund.observe.report.curve import curve
from verbund.observe.report.scale import number, seconds, share, size
from verbund.observe.report.text import bullets, details, prose, table
from verbund.observe.timeline import KINDS, Timeline

_MEANING = {
    "compute": "forward, backward, optimiser",
    "communicate": "in a collective, since the last worker came to it; in a message, since it was sent",
    "wait": "in a collective, until the last worker came to it; for a message, until it was sent",
    "data": "waiting for samples",
    "checkpoint": "copying the state, waiting for the disk",
    "validate": "validation",
    "start": "from the process's birth to its first step",
    "idle": "nothing that was recorded",
}
_STATUS = {"done": "done", "failed": "failed", "interrupted": "interrupted", "running": "goes on"}
_ENDED = {
    "steps": "ended by its number of steps",
    "epochs": "ended by its number of epochs",
    "seconds": "ended by its time",
    "target": "ended because the target was reached",
    "budget": "ended because the next round would have exceeded the privacy budget",
    "patience": "ended because the metric no longer improved",
    "interrupt": "stopped from outside",
}
_MATRIX = 40
_CURVES = 40
_PEERS = 200


def heading(name: str, summary: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """The run's name, what was trained and how it went, in words, and its key figures."""
    status = str(summary.get("status", "unknown"))
    shown = f'<span class="status {escape(status)}">{escape(_STATUS.get(status, status))}</span>'
    lead = f'<p class="lead">{prose(_sentence(summary, settings))}</p>'
    parts = [f"<header><h1>{escape(name)} {shown}</h1>{lead}"]
    cause = summary.get("cause")
    if isinstance(cause, Mapping):
        parts.append(f'<p class="cause" role="alert">{prose(str(from_record(dict(cause))))}</p>')
    cards = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in _cards(summary))
    parts.append(f'<dl class="cards">{cards}</dl></header>')
    return "".join(parts)


def verdict(summary: Mapping[str, Any]) -> str:
    return bullets(summary.get("held_back") or [], "verdict")


def curves(summary: Mapping[str, Any]) -> str:
    """The loss and each metric; metrics that are lists or tables are shown as they last were."""
    loss = _mapping(summary.get("loss"))
    figures = [curve("Training loss", loss.get("curve") or [])]
    tables = []
    for name, metric in list(_mapping(summary.get("metrics")).items())[:_CURVES]:
        metric = _mapping(metric)
        if metric.get("curve"):
            figures.append(curve(f"Validation {name}", metric["curve"], better=metric.get("better")))
        elif metric.get("last") is not None:
            tables.append(_value(str(name), metric["last"]))
    shown = "".join(figures)
    return (f'<div class="grid2">{shown}</div>' if shown else "") + "".join(tables)


def time(summary: Mapping[str, Any], timeline: Timeline) -> str:
    """Bars, their meaning, the seconds as a table, and timelines of a few steps."""
    rows = [
        (_name(worker), {k: float(v or 0.0) for k, v in worker["seconds"].items()}, worker)
        for worker in summary.get("workers") or []
    ]
    if not rows:
        return ""
    several = len(rows) > 1
    used = [kind for kind in KINDS if any(taken.get(kind, 0.0) > 0 for _, taken, _ in rows)]
    legend = "".join(
        f'<li><span class="key {kind}"></span><b>{kind}</b> {escape(_MEANING[kind])}</li>' for kind in used
    )
    head = ["", "total", *KINDS, *(["others waited for it"] if several else [])]
    cells = []
    for name, taken, worker in rows:
        waited = [seconds(worker.get("others_waited"))] if several else []
        cells.append((name, seconds(taken["total"]), *(seconds(taken[kind]) for kind in KINDS), *waited))
    total = sum(taken["total"] for _, taken, _ in rows)
    parts_of = (share(sum(taken[kind] for _, taken, _ in rows), total) for kind in KINDS)
    cells.append(("share", "", *parts_of, *([""] if several else [])))
    parts = [
        lanes.bars([(name, taken) for name, taken, _ in rows]),
        f'<ul class="legend">{legend}</ul>',
        table("Seconds", head, cells),
    ]
    generations = [life.journal.generation for life in timeline.lives if len(life.intervals["compute"])]
    newest = [life for life in timeline.lives if life.journal.generation == max(generations, default=0)]
    pictures = [lanes.timeline(newest, window) for window in lanes.windows(newest)]
    if pictures:
        of = " of the newest generation" if len(set(generations)) > 1 else ""
        parts.append(
            f"<h3>A few steps{of}, moment by moment</h3><p>A stretch begins when the first worker begins its first "
            'step. <span class="scripted">Point at a span to read it. Zoom with the buttons, or with Ctrl and the '
            "wheel; drag to move.</span></p>"
        )
        parts += pictures
    return "".join(parts)


def compression(summary: Mapping[str, Any]) -> str:
    """What gradients travelled as, how much smaller that was, and how much was left out."""
    found = _mapping(summary.get("compression"))
    if not found:
        return ""
    error = _mapping(found.get("relative_error"))
    ratio, estimate = found.get("ratio"), error.get("estimate")
    rows = [
        ("method", str(found.get("method"))),
        ("compressed steps", str(found.get("steps"))),
        ("ratio reached", "not measured" if ratio is None else f"{ratio:.1f}"),
        ("sent for gradients", size(found.get("bytes_with"))),
        ("without compression", size(found.get("bytes_without"))),
        ("relative error of a sum", "not measured" if estimate is None else f"about {estimate:.2g}"),
        ("computing for it, seconds a worker", seconds(found.get("seconds"))),
    ]
    told = f"Ratio: {found.get('how')}. Relative error: {error.get('how')}."
    inexact = "Compression is inexact: results are not those of one process. What is left out is sent in later steps."
    return f"<p>{escape(inexact)}</p>{table('Compression', ('', ''), rows)}<p>{escape(told)}</p>"


def exchange(summary: Mapping[str, Any]) -> str:
    """How islands that train alone combined what they learnt, and what that sent."""
    found = _mapping(summary.get("exchange"))
    if not found:
        return ""
    every, steps = found.get("exchanges") or 0, summary.get("steps") or 0
    ratio, estimate = found.get("ratio"), _mapping(found.get("relative_error")).get("estimate")
    rows = [
        ("exchange", str(found.get("method"))),
        ("exchanges of the whole model", str(every)),
        ("steps between two, on average", f"{steps / every:.1f}" if every else "there were none"),
        ("compression", str(found.get("compression"))),
        ("ratio reached", "not measured" if ratio is None else f"{ratio:.1f}"),
        ("sent by all workers together", size(found.get("bytes_with"))),
        ("without compression", size(found.get("bytes_without"))),
        ("relative error of a sum", "not measured" if estimate is None else f"about {estimate:.2g}"),
    ]
    told = f"Between exchanges islands train alone: results are not those of one process. Sent: {found.get('how')}."
    return f"{table('Exchange', ('', ''), rows)}<p>{escape(told)}</p>"


def costs(summary: Mapping[str, Any]) -> str:
    """Bytes and memory per process, what each worker holds of the model's state, and energy."""
    counts, memory = _mapping(summary.get("bytes")), _mapping(summary.get("peak_memory_bytes"))
    per_process = _mapping(counts.get("per_process"))
    names = list(dict.fromkeys((*memory, *per_process)))
    rows = []
    for name in names:
        entry = _mapping(per_process.get(name))
        rows.append((name, size(entry.get("sent")), size(entry.get("received")), size(memory.get(name))))
    parts = []
    if rows:
        if counts.get("sent") is not None and len(rows) > 1:
            rows.append(("all", size(counts["sent"]), size(counts.get("received")), ""))
        parts.append(table("Per process", ("", "sent", "received", "most memory"), rows))
    parts.append(_promise(_mapping(summary.get("memory_promise"))))
    steps = summary.get("steps") or 0
    each = ""
    if counts.get("sent") and steps:
        each = f" That is {size(counts['sent'] / steps)} sent per step by all processes together."
    if counts.get("shared"):
        each += f" Through shared memory, which is no network, went {size(counts['shared'])}."
    energy = _mapping(summary.get("energy"))
    joules = energy.get("joules")
    spent = str(energy.get("how") or "not measured") if joules is None else f"{number(joules)} J ({energy.get('how')})"
    parts.append(f"<p>Bytes: {prose(counts.get('how') or 'not measured')}.{each} Energy: {prose(spent)}.</p>")
    peers = [
        (str(name), str(peer), size(sent), size(received))
        for name in names
        for peer, (sent, received) in _mapping(_mapping(per_process.get(name)).get("peers")).items()
    ]
    if len(peers) > len(per_process):
        rows = peers[:_PEERS]
        title = (
            f"Bytes per connection ({len(rows)} of {len(peers)})" if len(peers) > len(rows) else "Bytes per connection"
        )
        parts.append(details(title, table(title, ("process", "peer", "sent", "received"), rows)))
    return "".join(parts)


def _promise(promise: Mapping[str, Any]) -> str:
    """Per worker the bytes of the model's state by kind, and their share of what one process alone would hold."""
    workers = _mapping(promise.get("workers"))
    kinds = [kind for kind in HELD if any(_mapping(w.get("held")).get(kind) for w in workers.values())]
    if not kinds:
        return ""
    rows = [
        (
            str(name),
            *(size(_mapping(worker.get("held")).get(kind, 0)) for kind in kinds),
            size(worker.get("total")),
            share(float(worker.get("total") or 0), float(promise.get("whole") or 0)),
            size(worker.get("peak")),
        )
        for name, worker in workers.items()
    ]
    whole = f" (one process alone: {size(promise['whole'])})" if promise.get("whole") else ""
    head = ("", *kinds, "all of these", "of one process's", "most memory, measured")
    return table(f"What each worker holds{whole}", head, rows)


def trouble(failures: Sequence[Mapping[str, Any]]) -> str:
    """The failures in the order of their time, each with its traceback to unfold."""
    parts = []
    for failure in failures:
        error = _mapping(failure.get("error"))
        where = f" ({error['where']})" if error.get("where") else ""
        consequence = " As a consequence of another failure." if failure.get("secondary") else ""
        fix = f" {error['fix']}." if error.get("fix") else ""
        what = f"{failure.get('process')}: {error.get('what')}{where}.{fix}{consequence}"
        trace = f"<pre>{escape(str(failure['trace']))}</pre>" if failure.get("trace") else ""
        parts.append(f"<li>{prose(what)}{details('Traceback', trace)}</li>")
    return f'<ul class="failures">{"".join(parts)}</ul>' if parts else ""


def notes(summary: Mapping[str, Any]) -> str:
    lines = list(dict.fromkeys([*(summary.get("notes") or []), *(summary.get("warnings") or [])]))
    checkpoints = _mapping(summary.get("checkpoints"))
    if checkpoints.get("saved"):
        kept = f"; the last one, of step {checkpoints.get('last_step')}, has {size(checkpoints.get('last_bytes'))}"
        lines.append(f"Checkpoints saved: {checkpoints['saved']}{kept}.")
    if (summary.get("generations") or 1) > 1:
        lines.append(
            f"The run has {summary['generations']} generations. Where a later one did a step again, its value counts; "
            "the seconds are those of all of them."
        )
    stride = max(
        (int(_mapping(entry).get("curve_stride") or 1) for entry in (summary.get("loss"), *_metrics(summary))),
        default=1,
    )
    if stride > 1:
        lines.append(f"The longest curve is shown thinned: one point in {stride}.")
    return bullets(lines)


def unmeasured(summary: Mapping[str, Any]) -> str:
    return bullets(summary.get("not_measured") or [])


def settings(summary: Mapping[str, Any], job: Mapping[str, Any]) -> str:
    """The settings that matter for the numbers, with what they mean, and the whole job."""
    if not job and not summary.get("strategy"):
        return ""
    train = _mapping(job.get("train"))
    precision = str(train.get("precision", "fp32"))
    group = train.get("group", 32)
    meaning = [
        f"Strategy: {_strategy(summary)}.",
        "Precision: fp32 throughout."
        if precision == "fp32"
        else f"Precision: forward and backward passes in {precision}; weights and optimiser in fp32.",
        f"Seed {job.get('seed', 0)}.",
        'Randomness is drawn per worker (`randomness = "worker"`): the numbers depend on how the work is divided.'
        if train.get("randomness") == "worker"
        else "Randomness belongs to the sample: dropout and augmentation do not depend on how the work is divided.",
        'Batch statistics, where the model has any, are over the whole global batch (`batch_norm = "global"`), as '
        "one process with that batch would have them."
        if train.get("batch_norm") == "global"
        else f"Batch statistics, where the model has any, are over groups of {group} samples of fixed composition: the "
        "same for any number of workers.",
    ]
    whole = f"<pre>{escape(tomli_w.dumps(dict(job)))}</pre>" if job else ""
    return bullets(meaning) + details("The whole job, with all defaults", whole)


# -- pieces ------------------------------------------------------------------------------------------------------


def _sentence(summary: Mapping[str, Any], job: Mapping[str, Any]) -> str:
    data, train = _mapping(job.get("data")), _mapping(job.get("train"))
    what = f"`{job['task']}`" if job.get("task") else "A model"
    on = f" on `{data['train']}`" if data.get("train") else ""
    steps, samples = summary.get("steps") or 0, summary.get("samples") or 0
    optimizer = _mapping(train.get("optimizer")).get("name")
    by = f" by {optimizer}" if optimizer else ""
    batch = f" of {number(train['global_batch'])} samples" if train.get("global_batch") else ""
    long = seconds(_mapping(summary.get("seconds")).get("total"))
    ended = f", {_ENDED.get(str(summary['ended_by']), str(summary['ended_by']))}" if summary.get("ended_by") else ""
    return (
        f"{what}, trained{on}{by} with {_strategy(summary)}: {number(steps)} {_plural(steps, 'step')}{batch} "
        f"({number(samples)} samples) in {long}{ended}."
    )


def _strategy(summary: Mapping[str, Any]) -> str:
    world = summary.get("world") or 0
    strategy = _mapping(summary.get("strategy"))
    mesh = ", ".join(f"{axis}={length}" for axis, length in _mapping(strategy.get("mesh")).items())
    islands = strategy.get("islands", 1)
    parts = [f"mesh {mesh}"] if mesh else []
    if islands != 1:
        parts.append(f"{islands} islands")
    if world > 1 or islands != 1:
        exchange = strategy.get("exchange", "all_reduce")
        name = exchange.get("name", "all_reduce") if isinstance(exchange, Mapping) else exchange
        parts.append(f"exchange {name}")
    return f"{world} {_plural(world, 'worker')}" + (f" ({', '.join(parts)})" if parts else "")


def _cards(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    cards = [("training loss", number(_mapping(summary.get("loss")).get("last")))]
    for name, metric in _mapping(summary.get("metrics")).items():
        last, best = _mapping(metric).get("last"), _mapping(metric).get("best")
        if isinstance(last, (int, float)) and len(cards) < 7:
            differs = isinstance(best, (int, float)) and not math.isclose(best, last, rel_tol=1e-4)
            cards.append((f"validation {name}" + (f" (best {number(best)})" if differs else ""), number(last)))
    if summary.get("samples_per_second"):
        cards.append(("samples per second", number(summary["samples_per_second"])))
    total = _mapping(summary.get("seconds"))
    if total.get("total") and total.get("compute") is not None:
        cards.append(("of the time computing", share(total["compute"], total["total"])))
    return cards


def _value(name: str, value: Any) -> str:
    """The last value of a metric that is no number."""
    if isinstance(value, Mapping):
        rows = [(str(key), _text(inner)) for key, inner in value.items()][:_MATRIX]
        return table(f"Last {name}", ("", "value"), rows)
    if not isinstance(value, list) or not value:
        return f"<p>Last {escape(name)}: {escape(_text(value))}</p>"
    matrix = value if isinstance(value[0], list) else [value]
    if len(matrix) > _MATRIX or any(not isinstance(row, list) or len(row) > _MATRIX for row in matrix):
        return f"<p>{escape(name)} is too large to show; it is in <code>summary.json</code>.</p>"
    hint = " (rows: the true class, columns: the predicted one)" if name == "confusion_matrix" else ""
    head = ["", *(str(index) for index in range(max(map(len, matrix))))]
    names = [str(index) for index in range(len(matrix))] if len(matrix) > 1 else [""]
    shown = [(names[index], *map(_text, row)) for index, row in enumerate(matrix)]
    return details(f"Last {name}{hint}", table(f"Last {name}{hint}", head, shown))


def _text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "–" if value is None else str(value)[:200]
    return number(value)


def _metrics(summary: Mapping[str, Any]) -> list[Any]:
    return list(_mapping(summary.get("metrics")).values())


def _name(worker: Mapping[str, Any]) -> str:
    rank, island = worker.get("rank"), worker.get("island")
    return f"worker {rank}" if not island else f"island {island}, worker {rank}"


def _plural(count: int, word: str) -> str:
    return word if count == 1 else f"{word}s"


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
