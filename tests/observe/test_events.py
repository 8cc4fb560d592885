"""The journal's writing side: threads, limits, a full disk."""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from verbund.observe.events import NEVER, Journal, Unrecorded
from verbund.observe.journal import read


def test_what_is_written_is_read(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "worker", 3, 2, island=1)
    journal.add("compute", 0, 100, 350)
    journal.collective(0, 1, 200, 220, 300)
    journal.action(0, "W", 5, 6, 400, 450)
    journal.received(0, 5, 6, 350, 400)
    journal.step(0, 0.5, 4.0, 4, 1e-3)
    journal.event("note", text="ä 'x'")
    journal.totals("links", links={"1.2.3.4:5": (7, 8)})
    journal.totals("memory", peak=99)
    journal.totals("held", parameters=40, whole=80)
    journal.totals("held", parameters=44, optimizer=88, whole=80)
    journal.totals("energy", joules=1.5, how="RAPL")
    journal.close()
    journal.close()
    (found,) = read(tmp_path)
    assert (found.role, found.rank, found.generation, found.island, found.ended) == ("worker", 3, 2, 1, True)
    assert found.spans.tolist() == [[0, 0, 100, 250]]
    assert found.collectives.tolist() == [[0, 1, 200, 220, 300]]
    assert found.actions.tolist() == [[0, 3, 5, 6, 400, 50]]
    assert found.receives.tolist() == [[0, 5, 6, 350, 400]]
    assert found.held == {"parameters": 44, "optimizer": 88, "whole": 80}
    assert found.steps.tolist() == [[0, 0.5, 4.0, 4.0, 1e-3]]
    assert found.links == {"1.2.3.4:5": (7, 8)}
    assert (found.peak_bytes, found.joules, found.damaged) == (99, (1.5, "RAPL"), 0)
    assert [event["text"] for event in found.events] == ["ä 'x'"]


def test_numbers_of_numpy_and_objects_do_not_break_an_event(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "worker", 0, 1)
    journal.event("validation", step=np.int64(3), metrics={"a": np.float32(0.5), "m": np.eye(2)}, path=Path("/x"))
    journal.close()
    event = read(tmp_path)[0].events[0]
    assert event["step"] == 3
    assert event["metrics"] == {"a": 0.5, "m": [[1.0, 0.0], [0.0, 1.0]]}
    assert event["path"] == "/x"


def test_rows_recorded_while_others_flush_are_neither_lost_nor_doubled(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "worker", 0, 1)
    each, stop = 20_000, threading.Event()
    former = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)

    def record(kind: str) -> None:
        for step in range(each):
            journal.add(kind, step, step, step + 1)

    def flush() -> None:
        while not stop.is_set():
            journal.flush()

    recorders = [threading.Thread(target=record, args=(kind,)) for kind in ("compute", "checkpoint")]
    flushers = [threading.Thread(target=flush) for _ in range(2)]
    try:
        for thread in (*recorders, *flushers):
            thread.start()
        for thread in recorders:
            thread.join()
    finally:
        stop.set()
        for thread in flushers:
            thread.join()
        sys.setswitchinterval(former)
    journal.close()
    (found,) = read(tmp_path)
    for kind in (0, 3):
        steps = found.spans[found.spans[:, 0] == kind, 1]
        assert steps.tolist() == list(range(each))


def test_a_journal_at_its_limit_thins_spans_and_keeps_steps(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "worker", 0, 1, limit_mb=0.1)
    for step in range(60_000):
        journal.add("compute", step, step * 10, step * 10 + 5)
        journal.collective(step, 0, step, step, step)
        journal.action(step, "F", 0, 0, step * 10, step * 10 + 5)
        journal.received(step, 0, 0, step * 10, step * 10)
        if step % 500 == 0:
            journal.add("validate", step, step, step + 1)
        if step % 50 == 0:
            journal.flush()
    journal.step(7, 0.5, 1.0, 1, 1e-3)
    journal.close()
    assert journal.path.stat().st_size < 0.1e6 * 1.3
    (found,) = read(tmp_path)
    firsts, strides = found.thinned.T.tolist()
    assert strides == [2, 4, 8, 16, 32, 64, 128, 256, NEVER][: len(strides)]
    assert len(strides) >= 5
    assert firsts == sorted(firsts)
    compute = found.spans[found.spans[:, 0] == 0, 1]
    for kept in (compute, found.collectives[:, 0], found.actions[:, 0], found.receives[:, 0]):
        for number, stride in enumerate(strides[:-1]):
            era = kept[(kept >= firsts[number]) & (kept < firsts[number + 1])]
            assert len(era)
            assert not (era % stride).any()
    assert (found.spans[:, 0] == 4).sum() == 120
    assert found.steps[:, 0].tolist() == [7]


def test_a_full_disk_costs_lines_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path, "worker", 0, 1)
    here: Any = journal._file
    real, room = os.write, [30]

    def write(descriptor: int, data: Any) -> int:
        if descriptor != here._file:
            return real(descriptor, data)
        if room[0] == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = real(descriptor, memoryview(data)[: room[0]])
        room[0] -= count
        return count

    monkeypatch.setattr(os, "write", write)
    journal.event("note", text="torn in the middle of its line, since there is room for thirty bytes only")
    journal.event("note", text="not written at all")
    monkeypatch.setattr(os, "write", real)
    journal.event("note", text="written again")
    journal.close()
    (found,) = read(tmp_path)
    assert [e.get("text") for e in found.events if e["name"] == "note"] == ["written again"]
    assert [e["lines"] for e in found.events if e["name"] == "dropped"] == [2]
    assert found.damaged == 1
    assert found.ended


def test_steps_wait_for_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path, "worker", 0, 1)
    real = os.write

    def full(descriptor: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    for step in range(3):
        journal.step(step, 1.0, 2.0, 2, 0.1)
        journal.add("compute", step, 1, 2)
        journal.flush()
    monkeypatch.setattr(os, "write", real)
    journal.step(3, 1.0, 2.0, 2, 0.1)
    journal.close()
    (found,) = read(tmp_path)
    assert found.steps[:, 0].tolist() == [0, 1, 2, 3]
    assert [e["lines"] for e in found.events if e["name"] == "dropped"] == [3]  # the spans


def test_who_appends_to_a_torn_file_begins_a_line(tmp_path: Path) -> None:
    first = Journal(tmp_path, "worker", 0, 1)
    first.close()
    with open(first.path, "a") as file:
        file.write('{"t":"spans","rows":[0,1')
    second = Journal(tmp_path, "worker", 0, 1)
    second.event("note", text="here")
    second.close()
    lines = [line for line in second.path.read_text().splitlines() if line]
    assert sum(_is_json(line) for line in lines) == len(lines) - 1
    assert [e["text"] for e in read(tmp_path)[0].events] == ["here"]


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def test_what_records_nothing_takes_all_that_a_journal_takes() -> None:
    public = {name for name in vars(Journal) if not name.startswith("_")} - {"span"}  # which calls `add`
    assert public <= vars(Unrecorded).keys()
    silent = Unrecorded()
    with silent.span("compute", 3):
        silent.share(3, 1, 1.0)
    silent.close()
    assert not silent.due
