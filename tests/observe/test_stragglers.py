"""Stragglers: against journals of which it is known who was slow, by how much and why."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import MS, write_pipeline, write_run

from verbund.observe.events import EXCHANGES, SPANS, Journal
from verbund.observe.garbage import record_pauses
from verbund.observe.journal import ProcessJournal, read
from verbund.observe.report.stragglers import stragglers as section
from verbund.observe.stragglers import measure
from verbund.observe.summary import summarise
from verbund.observe.timeline import merge

STEPS = 50


def write(
    folder: Path,
    of: Callable[[int, int], Mapping[str, float]],
    workers: int = 4,
    *,
    tickets: Callable[[int, int], bool] = lambda rank, step: True,
    exchange_every: int = 0,
    hosts: bool = False,
    limit_mb: float = 64.0,
    steps: int = STEPS,
) -> None:
    """Writes a run in which `of(rank, step)` says the milliseconds of `data`, `compute` and `garbage` (within
    computing), and the `samples` (8) and `weight` (8). Clocks of hosts differ by hours."""
    journals = [Journal(folder / "journal", "worker", rank, 1, limit_mb=limit_mb) for rank in range(workers)]
    now = [time.monotonic_ns() + (rank * 10**13 if hosts else 0) for rank in range(workers)]
    for step in range(steps):
        begun, taken = list(now), []
        for rank, journal in enumerate(journals):
            given = {"data": 1, "compute": 10, "garbage": 0, "samples": 8, "weight": 8, **of(rank, step)}
            if not tickets(rank, step):
                taken.append(0)
                continue
            data, compute, garbage = (int(given[key] * MS) for key in ("data", "compute", "garbage"))
            journal.add("data", step, now[rank], now[rank] + data)
            journal.add("compute", step, now[rank] + data, now[rank] + data + compute + garbage)
            if garbage:
                journal.garbage(now[rank] + data + MS, now[rank] + data + MS + garbage)
            journal.share(step, int(given["samples"]), given["weight"])
            taken.append(data + compute + garbage)
        joined = not exchange_every or (step + 1) % exchange_every == 0
        for rank, journal in enumerate(journals):
            came = begun[rank] + taken[rank]
            now[rank] = came
            if joined:
                now[rank] = begun[rank] + max(taken) + 2 * MS if not exchange_every else came + 2 * MS
                number = EXCHANGES if exchange_every else 0
                journal.collective(step + bool(exchange_every), number, came, came, now[rank])
            journal.flush()
    for rank, journal in enumerate(journals):
        if hosts:
            text = journal.path.read_text().replace('"host":"', f'"host":"h{rank}-', 1)
            journal.path.write_text(text)
        journal.close()


def found(folder: Path, settings: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    result = measure(merge(read(folder / "journal")), settings or {}, **more)
    assert result is not None
    return result


kinds = ("compute", "data", "garbage", "communicate", "validate")
span = st.tuples(st.sampled_from(kinds), st.integers(0, 2), st.integers(0, 40), st.integers(0, 12))


@given(st.lists(st.lists(span, max_size=7), min_size=2, max_size=4))
@settings(max_examples=150, deadline=None)
def test_what_is_lost_is_what_a_plain_account_says(workers: list[list[tuple[str, int, int, int]]]) -> None:
    """Millisecond by millisecond: a moment of a step is its worker's own if it computes or reads then and nothing else
    that the worker records says that it was blocked; reading comes before computing."""
    journals = []
    for rank, spans in enumerate(workers):
        journal = ProcessJournal(Path("x"), "worker", rank, 1, host="h")
        rows = [[SPANS.index(kind), step, start * MS, length * MS] for kind, step, start, length in spans]
        journal.spans = np.array(rows, np.int64).reshape(-1, 4)
        journal.begin, journal.end = 0, 60 * MS
        journals.append(journal)
    own: dict[int, dict[int, int]] = {}
    for rank, spans in enumerate(workers):
        blocked: set[int] = set()
        for kind, _, start, length in spans:
            if kind in ("communicate", "validate"):
                blocked |= set(range(start, start + length))
        pauses = {m for kind, _, start, length in spans if kind == "garbage" for m in range(start, start + length)}
        reading = {m for kind, _, start, length in spans if kind == "data" for m in range(start, start + length)}
        for step in {step for kind, step, _, length in spans if kind in ("compute", "data") and length}:
            mine = 0
            for kind, at, start, length in spans:
                moments = set(range(start, start + length)) - blocked - pauses
                if at == step and kind in ("compute", "data"):
                    mine += len(moments - (reading if kind == "compute" else set()))
            own.setdefault(step, {})[rank] = mine
    expected = 0
    for took in own.values():
        if len(took) > 1:
            expected += max(took.values()) - sorted(took.values())[(len(took) - 1) // 2]
    result = measure(merge(journals), {})
    if any(kind == "garbage" for spans in workers for kind, *_ in spans):
        assert result is None or result["lost_seconds"] >= 0  # which step a pause belongs to is told by its beginning
    else:
        assert (result or {"lost_seconds": 0})["lost_seconds"] == pytest.approx(expected / 1e3, abs=1e-6)


def test_a_slow_worker(tmp_path: Path) -> None:
    write(tmp_path, lambda rank, step: {"compute": 40 if rank == 3 else 10})
    result = found(tmp_path)
    assert result["lost_seconds"] == pytest.approx(STEPS * 0.030)
    (only,) = result["found"]
    assert (only["rank"], only["cause"]) == (3, "compute")
    assert only["slower"] == pytest.approx(41 / 11, abs=1e-3)
    assert only["lost_seconds"] == pytest.approx(STEPS * 0.030)
    slow = result["workers"][3]
    assert slow["excess"] == pytest.approx({"compute": 0.030})
    assert slow["seconds_per_step"] == pytest.approx(0.041)


def test_what_is_lost_is_the_slowest_less_the_lower_median_of_each_step(tmp_path: Path) -> None:
    times = {0: (10, 30, 12), 1: (14, 10, 11), 2: (20, 10, 10), 3: (11, 25, 10)}
    write(tmp_path, lambda rank, step: {"compute": times[rank][step]}, steps=3)
    result = found(tmp_path)
    # own seconds are 1 ms more; sorted: 10 11 14 20; 10 10 25 30; 10 10 11 12
    assert result["lost_seconds"] == pytest.approx(0.009 + 0.020 + 0.002)
    lost = [row["lost_seconds"] for row in result["workers"]]
    assert lost == pytest.approx([0.022, 0.0, 0.009, 0.0])


def test_of_two_workers_the_faster_one_is_the_measure(tmp_path: Path) -> None:
    write(tmp_path, lambda rank, step: {"compute": 25 if rank == 0 else 10}, workers=2)
    result = found(tmp_path)
    assert [each["rank"] for each in result["found"]] == [0]
    assert result["lost_seconds"] == pytest.approx(STEPS * 0.015)


def test_each_cause_is_told_from_the_others(tmp_path: Path) -> None:
    """Eight workers of which five are slow, each for another reason, would be no stragglers: one at a time."""
    causes: dict[str, dict[str, float]] = {
        "data": {"data": 21},
        "garbage": {"garbage": 20},
        "samples": {"compute": 30, "samples": 24, "weight": 24},
        "compute": {"compute": 30},
    }
    for cause, change in causes.items():
        write(tmp_path / cause, lambda rank, step, change=change: change if rank == 1 else {})  # type: ignore[misc]
        (only,) = found(tmp_path / cause)["found"]
        assert (only["rank"], only["cause"]) == (1, cause)
        assert only["lost_seconds"] == pytest.approx(STEPS * 0.020)


def test_tokens_count_as_samples(tmp_path: Path) -> None:
    write(tmp_path, lambda rank, step: {"compute": 20, "weight": 16} if rank == 2 else {})
    (only,) = found(tmp_path)["found"]
    assert (only["rank"], only["cause"]) == (2, "samples")


def test_more_samples_explain_no_more_than_their_share(tmp_path: Path) -> None:
    write(tmp_path, lambda rank, step: {"compute": 60, "samples": 16, "weight": 16} if rank == 2 else {})
    slow = found(tmp_path)["workers"][2]
    assert slow["excess"] == pytest.approx({"samples": 0.010, "compute": 0.040})
    assert slow["cause"] == "compute"


def test_a_pause_now_and_then_is_no_slow_worker_but_is_counted(tmp_path: Path) -> None:
    write(tmp_path, lambda rank, step: {"garbage": 30} if rank == 0 and step % 10 == 0 else {})
    result = found(tmp_path)
    assert result["lost_seconds"] == pytest.approx(5 * 0.030)
    assert result["workers"][0]["excess"] == pytest.approx({"garbage": 0.003})


def test_even_workers_have_no_straggler(tmp_path: Path) -> None:
    write(tmp_path, lambda rank, step: {"compute": 10 + (rank + step) % 4 * 0.1})
    assert found(tmp_path)["found"] == []


def test_clocks_are_not_compared(tmp_path: Path) -> None:
    write(tmp_path, lambda rank, step: {"compute": 40 if rank == 3 else 10}, hosts=True)
    timeline = merge(read(tmp_path / "journal"))
    assert not timeline.wait_measured
    result = measure(timeline, {})
    assert result is not None
    assert result["lost_seconds"] == pytest.approx(STEPS * 0.030)


def test_islands_that_train_alone_are_compared_between_their_exchanges(tmp_path: Path) -> None:
    """Two islands of two workers; in turn one is slow, so that little is lost between exchanges of ten steps."""
    settings = {"strategy": {"islands": 4, "exchange": {"name": "local_sgd", "every": 10}}}
    write(tmp_path / "turns", lambda rank, step: {"compute": 20 if step % 4 == rank else 10}, exchange_every=10)
    result = found(tmp_path / "turns", settings)
    # In every ten steps two islands are slow three times and two twice: 10 ms more than the lower median.
    assert result["lost_seconds"] == pytest.approx(5 * 0.010)
    write(tmp_path / "one", lambda rank, step: {"compute": 20 if rank == 2 else 10}, exchange_every=10)
    result = found(tmp_path / "one", settings)
    assert result["lost_seconds"] == pytest.approx(STEPS * 0.010)
    assert [each["rank"] for each in result["found"]] == [2]


def test_who_waits_for_nobody_loses_nothing_but_is_compared(tmp_path: Path) -> None:
    settings = {"strategy": {"islands": 4, "exchange": {"name": "parameter_server", "consistency": "asynchronous"}}}
    write(
        tmp_path,
        lambda rank, step: {"compute": 40 if rank == 3 else 10},
        tickets=lambda rank, step: step % 4 == rank,
    )
    result = found(tmp_path, settings)
    assert result["lost_seconds"] == 0
    assert result["found"] == []
    assert result["workers"][3]["slower"] == pytest.approx(41 / 11, abs=1e-3)


def test_shared_tickets_of_servers_are_waited_for(tmp_path: Path) -> None:
    settings = {"strategy": {"islands": 4, "exchange": {"name": "parameter_server"}}}
    write(tmp_path, lambda rank, step: {"compute": 40 if rank == 3 else 10})
    assert found(tmp_path, settings)["lost_seconds"] == pytest.approx(STEPS * 0.030)


def test_a_long_stage_is_told_from_a_slow_worker(tmp_path: Path) -> None:
    write_pipeline(tmp_path / "stage", ranks=4, micro_batches=8, slow=2, steps=STEPS)
    (only,) = found(tmp_path / "stage")["found"]
    assert (only["rank"], only["cause"]) == (2, "stage")


def test_a_journal_at_its_limit_is_extrapolated(tmp_path: Path) -> None:
    write(tmp_path, lambda rank, step: {"compute": 40 if rank == 3 else 10}, limit_mb=0.2, steps=1500)
    timeline = merge(read(tmp_path / "journal"))
    assert timeline.estimated
    result = measure(timeline, {})
    assert result is not None
    assert result["lost_seconds"] == pytest.approx(1500 * 0.030, rel=0.1)


def test_one_host_with_a_slow_link(tmp_path: Path) -> None:
    hosts = ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
    write(tmp_path, lambda rank, step: {}, workers=3)
    timeline = merge(read(tmp_path / "journal"))
    for life, host in zip(timeline.lives, hosts, strict=True):
        life.journal.address = host
        life.seconds["communicate"] = life.total / 2
    links = [
        {"from": a, "to": b, "bandwidth": 1e6 if hosts[2] in (a, b) else 1e7} for a in hosts for b in hosts if a != b
    ]
    result = measure(timeline, {}, {"links": links})
    assert result is not None
    (only,) = result["found"]
    assert (only["rank"], only["cause"]) == (2, "link")
    assert only["lost_seconds"] == pytest.approx(timeline.seconds["communicate"] * 0.9, abs=1e-5)


def test_a_single_worker_is_not_compared(tmp_path: Path) -> None:
    write_run(tmp_path, workers=1)
    assert measure(merge(read(tmp_path / "journal")), {}) is None


def test_summary_and_report_say_it(tmp_path: Path) -> None:
    write(tmp_path, lambda rank, step: {"compute": 40 if rank == 3 else 10})
    summary = summarise(tmp_path, status="done")
    assert summary["stragglers"]["found"][0]["rank"] == 3
    text = section(summary)
    assert "worker 3: 3.7 times slower than the others: slow compute; 1.50 s were lost to it" in text
    assert "samples a step" in text
    assert section({}) == ""


def test_shares_by_speed_are_told(tmp_path: Path) -> None:
    write(tmp_path, lambda rank, step: {})
    assert summarise(tmp_path, status="done")["stragglers"]["shares"] is None
    later = Journal(tmp_path / "journal", "worker", 0, 1, life=1)
    for samples in ([10, 10, 10, 2], "damaged", [9, 9, 11, 3]):
        later.event("shares", step=20, samples=samples)
    later.close()
    summary = summarise(tmp_path, status="done")
    assert summary["stragglers"]["shares"] == {"changes": 2, "samples": [9, 9, 11, 3]}
    assert "changed 2 times; of a global batch the workers had 9, 9, 11, 3 samples at last" in section(summary)


def test_pauses_are_recorded(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "worker", 0, 1)
    end = record_pauses(journal, shortest=0)
    try:
        gc.collect()
    finally:
        end()
    gc.collect()
    journal.close()
    (written,) = read(tmp_path)
    spans = written.spans[written.spans[:, 0] == SPANS.index("garbage")]
    assert len(spans) >= 1
    assert (spans[:, 3] > 0).all()
