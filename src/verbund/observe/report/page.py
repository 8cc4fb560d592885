"""The page of a report, from a run's summary and timeline."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from verbund.errors import RunFailed
from verbund.observe.journal import read
from verbund.observe.report import charts
from verbund.observe.timeline import KINDS, Timeline, merge

_MEANING = {
    "compute": "forward, backward, optimiser",
    "communicate": "all-reduce, after the last worker had come",
    "wait": "all-reduce, before the last worker had come",
    "data": "waiting for samples",
    "checkpoint": "copying the state, waiting for the disk",
    "validate": "validation",
    "start": "from the fork to the first step",
    "idle": "nothing that was recorded",
}
_STATUS = {
    "done": "The run is done",
    "failed": "The run failed",
    "interrupted": "The run was interrupted",
    "running": "The run goes on",
}
_MATRIX = 30


def write_report(run_dir: Path, summary: Mapping[str, Any], timeline: Timeline | None = None) -> Path:
    """Writes `report.html` into a run's directory, in one step.

    Args:
        run_dir: the run.
        summary: what `summary.json` holds.
        timeline: if it was merged already.

    Raises:
        RunFailed: if the file cannot be written.
    """
    timeline = merge(read(run_dir / "journal")) if timeline is None else timeline
    target = run_dir / "report.html"
    partial = run_dir / ".report.html.partial"
    try:
        partial.write_text(_page(run_dir, summary, timeline), encoding="utf-8")
        os.replace(partial, target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise RunFailed(f"cannot be written: {error.strerror or error}", where=str(target)) from None
    return target


def _page(run_dir: Path, summary: Mapping[str, Any], timeline: Timeline) -> str:
    style = resources.files(__package__ or "").joinpath("style.css").read_text(encoding="utf-8")
    script = resources.files(__package__ or "").joinpath("script.js").read_text(encoding="utf-8")
    name = escape(run_dir.resolve().name)
    sections = [
        _words(run_dir, summary),
        _curves(summary),
        _time(summary, timeline),
        _links(summary),
        _trouble(summary),
        _settings(run_dir),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; style-src '
        "'unsafe-inline'; "
        "script-src 'unsafe-inline'\">"
        f"<title>{name}: report</title><style>{style}</style></head><body><main>"
        f"<h1>{name}</h1>{''.join(sections)}</main><script>{script}</script></body></html>\n"
    )


def _words(run_dir: Path, summary: Mapping[str, Any]) -> str:
    status = str(summary.get("status"))
    world = summary.get("world")
    workers = f"{world} worker{'s' if world != 1 else ''}"
    ended = f" ({escape(str(summary['ended_by']))} reached)" if summary.get("ended_by") else ""
    lead = (
        f"{_STATUS.get(status, status)}{ended}: {summary.get('steps', 0):,} steps, "
        f"{summary.get('samples', 0):,} samples, "
        f"{workers}, {_seconds(summary.get('seconds', {}).get('total'))}."
    )
    cards = [("loss", _number((summary.get("loss") or {}).get("last")))]
    for metric, value in (summary.get("metrics") or {}).items():
        if isinstance(value.get("last"), (int, float)):
            best = f", best {_number(value['best'])}" if isinstance(value.get("best"), (int, float)) else ""
            cards.append((f"validation {metric}{best}", _number(value["last"])))
    if summary.get("samples_per_second"):
        cards.append(("samples per second", _number(summary["samples_per_second"])))
    parts = [f'<p class="lead {escape(status)}">{lead}</p>']
    if summary.get("cause"):
        cause = summary["cause"]
        where = f"{cause.get('where')}: " if cause.get("where") else ""
        parts.append(
            f'<p class="cause">{escape(where)}{escape(str(cause.get("what")))}. {escape(cause.get("fix") or "")}</p>'
        )
    parts.append(
        '<dl class="cards">'
        + "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in cards)
        + "</dl>"
    )
    held = summary.get("held_back") or []
    parts.append("<h2>What held this run back</h2>" + _list(held))
    return "".join(parts)


def _curves(summary: Mapping[str, Any]) -> str:
    loss = summary.get("loss") or {}
    figures = [charts.curve("Training loss", loss.get("curve") or [])]
    tables = []
    for name, metric in (summary.get("metrics") or {}).items():
        points = [(step, value) for step, value in metric.get("curve") or [] if isinstance(value, (int, float))]
        if points:
            figures.append(charts.curve(f"Validation {name}", points))
        elif isinstance(metric.get("last"), list):
            tables.append(_matrix(name, metric["last"]))
    return "<h2>Curves</h2>" + "".join(figures) + "".join(tables)


def _matrix(name: str, values: Sequence[Any]) -> str:
    """The last value of a metric that is a list or a table."""
    rows = values if values and isinstance(values[0], list) else [values]
    if len(rows) > _MATRIX or any(len(row) > _MATRIX for row in rows):
        return f"<p>{escape(name)}: too large to show; it is in summary.json.</p>"
    columns = "".join(f'<th scope="col">{index}</th>' for index in range(len(rows[0])))
    body = "".join(
        f'<tr><th scope="row">{index if len(rows) > 1 else ""}</th>'
        + "".join(f"<td>{_number(value)}</td>" for value in row)
        + "</tr>"
        for index, row in enumerate(rows)
    )
    hint = " (rows: the true class, columns: the predicted one)" if name == "confusion_matrix" else ""
    return (
        f'<figure class="wide"><figcaption>Last {escape(name)}{hint}</figcaption>'
        f"<table><thead><tr><th></th>{columns}</tr></thead><tbody>{body}</tbody></table></figure>"
    )


def _time(summary: Mapping[str, Any], timeline: Timeline) -> str:
    rows = [
        (f"worker {worker['rank']}", worker["seconds"])
        for worker in summary.get("workers") or []
        if isinstance(worker.get("seconds"), Mapping)
    ]
    legend = "".join(f'<li><span class="key {kind}"></span>{kind}: {escape(_MEANING[kind])}</li>' for kind in KINDS)
    parts = ["<h2>Where the time went</h2>", charts.shares(rows), f'<ul class="legend">{legend}</ul>']
    if rows:
        head = "".join(f'<th scope="col">{kind}</th>' for kind in ("total", *KINDS))
        body = "".join(
            f'<tr><th scope="row">{escape(name)}</th>'
            + "".join(f"<td>{seconds.get(kind, 0.0):.2f}</td>" for kind in ("total", *KINDS))
            + "</tr>"
            for name, seconds in rows
        )
        parts.append(
            '<figure class="wide"><figcaption>Seconds</figcaption>'
            f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table></figure>"
        )
    newest = max((life.journal.generation for life in timeline.lives), default=0)
    lives = [life for life in timeline.lives if life.journal.generation == newest]
    parts += [charts.timeline(lives, window) for window in charts.windows(int(summary.get("steps") or 0))]
    return "".join(parts)


def _links(summary: Mapping[str, Any]) -> str:
    counts = summary.get("bytes") or {}
    memory = summary.get("peak_memory_bytes") or {}
    rows = []
    for name, entry in (counts.get("per_process") or {}).items():
        sent, received = entry.get("sent"), entry.get("received")
        rows.append((name, _bytes(sent), _bytes(received), _bytes(memory.get(name))))
    for name, peak in memory.items():
        if name not in (counts.get("per_process") or {}):
            rows.append((name, "–", "–", _bytes(peak)))
    if not rows:
        return ""
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>' + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:]) + "</tr>"
        for row in rows
    )
    energy = summary.get("energy") or {}
    joules = energy.get("joules")
    spent = f"{_number(joules)} J" if joules else "not measured"
    return (
        '<h2>Bytes, memory, energy</h2><figure class="wide"><table><thead><tr><th></th><th scope="col">sent</th>'
        f'<th scope="col">received</th><th scope="col">peak memory</th></tr></thead><tbody>{body}</tbody></table></figure>'
        f"<p>Bytes: {escape(str(counts.get('how') or 'not measured'))}. Energy: {escape(spent)} "
        f"({escape(str(energy.get('how') or 'no readable counter'))}).</p>"
    )


def _trouble(summary: Mapping[str, Any]) -> str:
    parts = []
    if summary.get("failures"):
        lines = []
        for failure in summary["failures"]:
            error = failure.get("error") or {}
            text = f"{failure.get('process')}: {error.get('what') or failure}"
            lines.append(text + (" (a consequence)" if failure.get("secondary") else ""))
        parts.append("<h2>Failures</h2>" + _list(lines))
    notes = [*(summary.get("notes") or []), *(summary.get("warnings") or [])]
    if notes:
        parts.append("<h2>Notes</h2>" + _list(notes))
    if summary.get("not_measured"):
        parts.append("<h2>Not measured</h2>" + _list(summary["not_measured"]))
    return "".join(parts)


def _settings(run_dir: Path) -> str:
    try:
        text = (run_dir / "job.toml").read_text(encoding="utf-8")
        train = tomllib.loads(text).get("train", {})
    except (OSError, ValueError):
        return ""
    meaning = []
    if train.get("randomness") == "worker":
        meaning.append("Randomness is drawn per worker: results depend on how the work is divided.")
    else:
        meaning.append("Randomness is keyed by the sample: results do not depend on how the work is divided.")
    if train.get("precision", "fp32") != "fp32":
        meaning.append(f"Forward and backward passes in {train['precision']}; weights and optimiser in fp32.")
    return (
        f"<h2>Settings</h2>{_list(meaning)}<details><summary>The whole job, with all defaults</summary>"
        f"<pre>{escape(text)}</pre></details>"
    )


def _list(lines: Iterable[Any]) -> str:
    items = "".join(f"<li>{escape(str(line))}</li>" for line in lines)
    return f"<ul>{items}</ul>" if items else ""


def _number(value: Any) -> str:
    return charts.number(float(value)) if isinstance(value, (int, float)) else "–"


def _seconds(value: Any) -> str:
    if not isinstance(value, (int, float)):
        return "time not measured"
    if value < 120:
        return f"{value:.1f} s"
    return f"{int(value // 3600)} h {int(value % 3600 // 60)} min" if value >= 3600 else f"{value / 60:.1f} min"


def _bytes(value: Any) -> str:
    if not isinstance(value, (int, float)):
        return "–"
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"
