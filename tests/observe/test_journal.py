"""Reading journals that nobody promised anything about."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import write_run

from verbund.observe.events import Unrecorded
from verbund.observe.journal import ProcessJournal, read
from verbund.observe.summary import summarise

HEAD = {"t": "head", "role": "worker", "rank": 0, "generation": 1, "monotonic": 5, "wall": 1.0, "host": "h", "pid": 1}

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)
keys = (
    "rows",
    "at",
    "links",
    "peak",
    "name",
    "after",
    "stride",
    "rank",
    "monotonic",
    "step",
    "metrics",
    "joules",
    "text",
    "whole",
    "optimizer",
    "schedule",
    "ranks",
    "chunks",
    "micro_batches",
)
kinds = ("head", "spans", "collectives", "actions", "receives", "steps", "links", "memory", "held", "energy", "event",
         "end", "new")  # fmt: skip
lines = st.builds(
    lambda kind, fields: {"t": kind, **fields},
    st.sampled_from(kinds),
    st.dictionaries(st.sampled_from(keys), values, max_size=4),
)
named = st.builds(
    lambda line, name: {**line, "name": name}, lines, st.sampled_from(["validation", "failure", "thinned", "pipeline"])
)


def read_lines(*written: Any, **limits: int) -> list[ProcessJournal]:
    with tempfile.TemporaryDirectory() as folder:
        text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in written)
        Path(folder, "worker-0-1.jsonl").write_text(text + "\n")
        return read(Path(folder), **limits)


@given(st.lists(lines | named, max_size=8))
@settings(max_examples=60, deadline=None)
def test_any_lines_are_read_and_summed_up(written: list[dict[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "journal")
        folder.mkdir()
        text = "\n".join(json.dumps(line) for line in [HEAD, *written])
        (folder / "worker-0-1.jsonl").write_text(text)
        (found,) = read(folder)
        assert found.begin <= found.end
        summary = summarise(Path(name), status="failed")
        json.dumps(summary, allow_nan=False)


@given(st.binary(max_size=400))
@settings(max_examples=60, deadline=None)
def test_any_bytes_are_survived(raw: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "worker-0-1.jsonl").write_bytes(json.dumps(HEAD).encode() + b"\n" + raw)
        Path(folder, "garbage.jsonl").write_bytes(raw)
        found = read(Path(folder))
        assert found[0].rank == 0


def test_nothing_there() -> None:
    assert read(Path("/nonexistent/journal")) == []


def test_a_torn_last_line_costs_that_line_only() -> None:
    (found,) = read_lines(HEAD, {"t": "spans", "rows": [0, 1, 10, 5]}, '{"t":"spans","rows":[0,2,20')
    assert found.spans.tolist() == [[0, 1, 10, 5]]
    assert found.damaged == 1
    assert not found.ended


@pytest.mark.parametrize(
    "rows",
    [
        [1, 2, 3],
        [0.5, 1, 2, 3],
        ["0", "1", "2", "3"],
        [[0, 1, 2, 3]],
        [True, False, True, True],
        [1 << 70, 0, 0, 0],
        [9, 0, 0, 0],
        [-1, 0, 0, 0],
        [0, 0, 5, -1],
        {"a": 1},
        7,
        None,
    ],
)
def test_rows_that_are_none_are_dropped_and_counted(rows: Any) -> None:
    (found,) = read_lines(HEAD, {"t": "spans", "rows": rows}, {"t": "spans", "rows": [0, 0, 0, 1]})
    assert found.spans.tolist() == [[0, 0, 0, 1]]
    assert found.damaged == 1


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ("actions", [0, 1, 2, 3, 4, 5], [0, 4, 2, 3, 4, 5]),
        ("actions", [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, -5]),
        ("actions", [0, 1, 2, 3, 4, 5], [1 << 40, 1, 2, 3, 4, 5]),
        ("actions", [0, 1, 2, 3, 4, 5], [0, 1, 1 << 20, 3, 4, 5]),
        ("receives", [0, 1, 2, 3, 4], [0, 1, 2, 3, 2]),
        ("receives", [0, 1, 2, 3, 4], [0, -1, 2, 3, 4]),
        ("receives", [0, 1, 2, 3, 4], [0, 1, 1 << 30, 3, 4]),
    ],
)
def test_passes_that_cannot_be_are_dropped_and_counted(kind: str, good: list[int], bad: list[int]) -> None:
    (found,) = read_lines(HEAD, {"t": kind, "rows": [*good, *bad]})
    assert getattr(found, kind).tolist() == [good]
    assert found.damaged == 1


def test_a_line_too_long_is_passed_over() -> None:
    long = {"t": "spans", "rows": [0, 0, 0, 1] * 1000}
    (found,) = read_lines(HEAD, long, {"t": "spans", "rows": [0, 0, 0, 2]}, line_limit=500)
    assert found.spans.tolist() == [[0, 0, 0, 2]]
    assert found.damaged == 1


def test_a_file_too_long_is_read_to_the_limit_and_says_so() -> None:
    (found,) = read_lines(HEAD, *({"t": "spans", "rows": [0, i, 0, 1]} for i in range(1000)), file_limit=5000)
    assert found.truncated
    assert 0 < len(found.spans) < 200
    (whole,) = read_lines(HEAD, {"t": "spans", "rows": [0, 0, 0, 1]})
    assert not whole.truncated


def test_a_file_of_garbage_without_a_head_is_left_out() -> None:
    assert read_lines(*["x"] * 3000) == []
    assert read_lines({**HEAD, "rank": -1}) == []
    assert read_lines({**HEAD, "monotonic": "now"}) == []


def test_a_step_recorded_twice_counts_as_last_recorded_and_nan_is_a_loss() -> None:
    rows = [[1, 0.5, 1, 1, 1], [0, 0.7, 1, 1, 1], [1, float("nan"), 1, 1, 1]]
    (found,) = read_lines(HEAD, {"t": "steps", "rows": rows})
    assert found.steps[:, 0].tolist() == [0, 1]
    assert np.isnan(found.steps[1, 1])


def test_journals_come_by_generation_and_rank(tmp_path: Path) -> None:
    write_run(tmp_path, generation=2, steps=1)
    write_run(tmp_path, generation=1, workers=3, steps=1)
    order = [(j.generation, j.rank) for j in read(tmp_path / "journal")]
    assert order == [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1)]


def test_what_is_not_recorded_takes_all_that_a_step_records() -> None:
    unrecorded = Unrecorded()
    unrecorded.add("compute", 0, 1, 2)
    unrecorded.collective(0, 0, 1, 2, 3)
    unrecorded.action(0, "forward", 0, 0, 1, 2)
    unrecorded.received(0, 0, 0, 1, 2)
    unrecorded.share(0, 4, 4.0)
