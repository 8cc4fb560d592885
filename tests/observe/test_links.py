"""The links between hosts: what a run used of them, and when one is said to hold it back."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verbund.observe.events import Journal
from verbund.observe.links import _without
from verbund.observe.report.network import network as shown
from verbund.observe.summary import summarise
from verbund.observe.timeline import union

MS = 1_000_000
HOSTS = ["10.0.0.1", "10.0.0.2"]


def write(folder: Path, *, moved: int, links: Any = None, compute: int = 5, communicate: int = 20) -> None:
    """Ten steps of two workers on two hosts of 1 MB/s, which move so many bytes each way in all."""
    known = [{"from": a, "to": 1 - a, "latency": 1e-4, "bandwidth": 1e6} for a in (0, 1)] if links is None else links
    supervisor = Journal(folder / "journal", "supervisor", 0, 1, address=HOSTS[0])
    supervisor.event("network", hosts=HOSTS, links=known, bytes=[[7, 8], [8, 7]], wire=[[70, 80], [80, 70]])
    supervisor.totals("links", links={f"{HOSTS[1]}:9": [1, 2], f"{HOSTS[0]}:9": [500, 500]}, wire=None)
    supervisor.close()
    begin = time.monotonic_ns()
    for rank in (0, 1):
        journal = Journal(folder / "journal", "worker", rank, 1, address=HOSTS[rank])
        now = begin
        for step in range(10):
            ready = now + compute * MS
            journal.add("compute", step, now, ready)
            journal.collective(step, 0, ready, ready, ready + communicate * MS)
            now = ready + communicate * MS
            if rank == 0:
                journal.step(step, 1.0, 8.0, 8, 1e-3)
        peer = f"{HOSTS[1 - rank]}:7"
        journal.totals("links", links={peer: [moved, moved]}, wire={peer: [moved + 10, moved + 20]})
        journal.close()


def test_what_a_run_used(tmp_path: Path) -> None:
    write(tmp_path, moved=190_000)
    summary = summarise(tmp_path, status="done")
    found = summary["network"]
    first = found["links"][0]
    assert (first["from"], first["to"], first["latency"], first["bandwidth"]) == (*HOSTS, 1e-4, 1e6)
    assert first["sent"] == 190_000
    assert first["rate"] == pytest.approx(950_000)
    host = found["hosts"][HOSTS[0]]
    assert (host["sent"], host["received"]) == (190_000 + 7 + 1, 190_000 + 8 + 2)
    assert (host["wire_sent"], host["wire_received"]) == (190_010 + 70, 190_020 + 80)
    assert host["communicating"] == pytest.approx(0.2)
    assert host["used_out"] == pytest.approx(0.95)
    (sentence,) = (line for line in summary["held_back"] if "the link from" in line)
    assert sentence.startswith("80 % of the workers' time went into waiting for the link from 10.0.0.1 to 10.0.0.2")
    assert "(7.6 of 8 Mbit/s)" in sentence
    page = shown(summary, {})
    assert "All that travels between hosts is encrypted" in page
    assert "`wire`" not in page
    trusted = shown(summary, {"cluster": {"trusted_network": "10.0.0.0/24"}})
    assert "without encryption, within the trusted network 10.0.0.0/24" in trusted
    assert "10.0.0.1 → 10.0.0.2" in page
    assert "95.0 %" in page


@pytest.mark.parametrize(
    ("moved", "communicate"),
    [
        (100_000, 20),  # half of the link
        (9_500, 1),  # a full link, for a sixth of the time
    ],
)
def test_a_link_is_blamed_only_for_what_it_does(moved: int, communicate: int, tmp_path: Path) -> None:
    write(tmp_path, moved=moved, communicate=communicate)
    assert not [line for line in summarise(tmp_path, status="done")["held_back"] if "the link from" in line]


@pytest.mark.parametrize("links", [7, [], [{"from": 9, "to": 0}], [{"from": 0, "to": 1, "latency": "x"}], [None]])
def test_a_damaged_measurement_is_passed_over(links: Any, tmp_path: Path) -> None:
    write(tmp_path, moved=1000, links=links)
    summary = summarise(tmp_path, status="done")
    assert not (summary["network"] or {"links": []})["links"]
    assert isinstance(shown(summary, {}), str)


def test_one_host_has_no_network(tmp_path: Path) -> None:
    Journal(tmp_path / "journal", "worker", 0, 1).close()
    summary = summarise(tmp_path, status="done")
    assert summary["network"] is None
    assert shown(summary, {}) == ""


INTERVALS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda p: (min(p), max(p))), max_size=6)


@given(INTERVALS, INTERVALS)
def test_what_is_left_without_holes(whole: list[tuple[int, int]], holes: list[tuple[int, int]]) -> None:
    one, other = (union(np.array(rows, np.int64).reshape(-1, 2)) for rows in (whole, holes))
    left = {x for low, high in _without(one, other).tolist() for x in range(low, high)}
    covered = [{x for low, high in rows for x in range(low, high)} for rows in (whole, holes)]
    assert left == covered[0] - covered[1]
