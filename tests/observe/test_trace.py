"""The Chrome trace, read as Perfetto would."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from runs import write_pipeline, write_run

from verbund.errors import InputError
from verbund.observe.trace import write_trace


def test_one_process_per_worker_one_row_per_kind_in_microseconds(tmp_path: Path) -> None:
    write_run(tmp_path, slow=1, steps=10)
    trace = json.loads(write_trace(tmp_path, tmp_path / "trace.json").read_text())
    events = trace["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert [name.split(",")[0] for name in names.values()] == ["worker 0", "worker 1"]
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = [e for e in events if e["ph"] == "X"]
    assert all(rows[e["pid"], e["tid"]] == e["name"] for e in spans)
    assert Counter((e["pid"], e["name"]) for e in spans) == {
        **{(pid, "compute"): 20 for pid in (1, 2)},
        **{(pid, kind): 10 for pid in (1, 2) for kind in ("data", "communicate")},
        **{(pid, "validate"): 2 for pid in (1, 2)},
        **{(pid, "start"): 1 for pid in (1, 2)},
        (1, "wait"): 10,
    }
    wait = next(e for e in spans if e["name"] == "wait")
    assert wait["dur"] == pytest.approx(10_000)
    assert min(e["ts"] for e in spans) >= 0
    assert trace["otherData"]["shortened"] == "no"


def test_a_long_run_is_shortened_to_its_ends_and_says_so(tmp_path: Path) -> None:
    write_run(tmp_path, steps=200, validate_every=1000)
    trace = json.loads(write_trace(tmp_path, tmp_path / "trace.json", limit=280).read_text())
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert len(spans) <= 280
    steps = {e["args"]["step"] for e in spans if e["name"] == "data" and e["pid"] == 1}
    assert {0, 199} <= steps
    assert 100 not in steps
    assert trace["otherData"]["shortened"] == "worker 0, worker 1"


def test_a_pipelines_passes_have_a_row_and_names(tmp_path: Path) -> None:
    write_pipeline(tmp_path, ranks=2, micro_batches=3, steps=4)
    events = json.loads(write_trace(tmp_path, tmp_path / "trace.json").read_text())["traceEvents"]
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    passes = [e for e in events if e["ph"] == "X" and rows[e["pid"], e["tid"]] == "passes"]
    assert Counter(e["name"] for e in passes) == {f"{kind}{number}": 8 for kind in "FB" for number in range(3)}
    last = max((e for e in passes if e["pid"] == 2), key=lambda e: e["ts"])
    assert last["args"] == {"step": 3, "stage": 1, "micro-batch": 2}
    assert last["dur"] == pytest.approx(4000)


def test_no_run_and_no_place(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no worker's journal"):
        write_trace(tmp_path, tmp_path / "trace.json")
    write_run(tmp_path, steps=1)
    with pytest.raises(InputError, match="cannot be written"):
        write_trace(tmp_path, tmp_path / "none" / "trace.json")
