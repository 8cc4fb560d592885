"""A run's spans as a Chrome trace, for ui.perfetto.dev or chrome://tracing. No torch.

The format is Google's Trace Event Format (JSON object form): one process per worker and generation, one row
per kind of span and one of a pipeline's passes, complete events (`ph` X), times in microseconds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from verbund.errors import InputError
from verbund.observe.events import ACTIONS
from verbund.observe.journal import Ints, read
from verbund.observe.timeline import PRIORITY, Life, merge

EVENTS = 500_000
_ROWS = ("start", "data", "compute", "wait", "communicate", "validate", "checkpoint", "passes")


def write_trace(run_dir: Path, target: Path, *, limit: int = EVENTS) -> Path:
    """Writes the spans of all workers to `target`.

    Args:
        run_dir: the run.
        target: the file to write; it is replaced whole.
        limit: most spans written. Of a longer run the first and the last steps are kept, and `otherData` says
            so.

    Raises:
        InputError: if the run has no journal, or the file cannot be written.
    """
    timeline = merge(read(run_dir / "journal"))
    if not timeline.lives:
        raise InputError("has no worker's journal", where=str(run_dir), fix="Name the directory of a run")
    partial = target.with_name(f".{target.name}.partial")
    try:
        with open(partial, "w", encoding="utf-8") as file:
            _write(file, timeline.lives, limit)
        os.replace(partial, target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise InputError(f"cannot be written: {error.strerror or error}", where=str(target)) from None
    return target


def _write(file: TextIO, lives: list[Life], limit: int) -> None:
    origin = min(life.journal.begin for life in lives)
    share = max(limit // (len(lives) * len(_ROWS)), 2)
    longest = (max(len(life.journal.actions), *(len(life.intervals[kind]) for kind in PRIORITY)) for life in lives)
    shortened = [life.journal.name for life, length in zip(lives, longest, strict=True) if length > share]
    file.write('{"displayTimeUnit":"ms","otherData":')
    json.dump({"shortened": ", ".join(shortened) or "no"}, file)
    file.write(',"traceEvents":[')
    separator = "\n"
    for pid, life in enumerate(lives, 1):
        for event in (*_names(pid, life), *_spans(pid, life, origin, share), *_passes(pid, life, origin, share)):
            file.write(separator)
            json.dump(event, file, separators=(",", ":"))
            separator = ",\n"
    file.write("\n]}\n")


def _names(pid: int, life: Life) -> Iterator[dict[str, Any]]:
    journal = life.journal
    name = f"{journal.name}, generation {journal.generation} ({journal.host}, pid {journal.pid})"
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
    for tid, kind in enumerate(_ROWS if len(journal.actions) else _ROWS[:-1], 1):
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": kind}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}


def _spans(pid: int, life: Life, origin: int, share: int) -> Iterator[dict[str, Any]]:
    for tid, kind in enumerate(_ROWS[:-1], 1):
        for step, start, end in _ends(life.intervals[kind], share).tolist():
            yield {
                "ph": "X",
                "name": kind,
                "cat": kind,
                "pid": pid,
                "tid": tid,
                "ts": (start - origin) / 1e3,
                "dur": (end - start) / 1e3,
                "args": {"step": step},
            }


def _passes(pid: int, life: Life, origin: int, share: int) -> Iterator[dict[str, Any]]:
    for step, kind, stage, micro_batch, start, length in _ends(life.journal.actions, share, column=4).tolist():
        yield {
            "ph": "X",
            "name": f"{ACTIONS[kind]}{micro_batch}",
            "cat": ACTIONS[kind],
            "pid": pid,
            "tid": len(_ROWS),
            "ts": (start - origin) / 1e3,
            "dur": length / 1e3,
            "args": {"step": step, "stage": stage, "micro-batch": micro_batch},
        }


def _ends(rows: Ints, share: int, column: int = 1) -> Ints:
    """The first and last rows in time, `share` at most; `column` holds their start."""
    rows = rows[np.argsort(rows[:, column], kind="stable")]
    if len(rows) <= share:
        return rows
    half = share // 2
    return np.concatenate((rows[:half], rows[len(rows) - (share - half) :]))
