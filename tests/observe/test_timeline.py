"""Merging journals: against a second by second account in plain Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import MS, write_pipeline, write_run

from verbund.observe.events import NEVER, SPANS, Journal, index_among
from verbund.observe.journal import ProcessJournal, read
from verbund.observe.timeline import KINDS, PRIORITY, merge, union

pairs = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=25)


@given(pairs)
@settings(max_examples=200, deadline=None)
def test_union_covers_the_same_moments_once(raw: list[tuple[int, int]]) -> None:
    intervals = np.array(raw, np.int64).reshape(-1, 2)
    covered = {moment for start, end in raw for moment in range(start, end)}
    result = union(intervals)
    assert {m for start, end in result.tolist() for m in range(start, end)} == covered
    assert (result[:, 1] > result[:, 0]).all()
    assert (result[1:, 0] > result[:-1, 1]).all()


counted = [SPANS.index(kind) for kind in PRIORITY if kind in SPANS]
collective = st.tuples(st.integers(0, 3), st.integers(0, 2))
times = st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(0, 40)).map(sorted)
worker = st.tuples(
    st.dictionaries(collective, times, max_size=6),
    st.lists(
        st.tuples(
            st.sampled_from(counted),
            st.integers(0, 40),
            st.integers(0, 12),
        ),
        max_size=6,
    ),
)


@given(st.lists(worker, min_size=1, max_size=4))
@settings(max_examples=150, deadline=None)
def test_each_moment_counts_once_for_what_it_was(workers: list[tuple[dict, list]]) -> None:
    journals = []
    for rank, (rows, spans) in enumerate(workers):
        journal = ProcessJournal(Path("x"), "worker", rank, 1, host="h")
        journal.collectives = np.array([[s, i, *t] for (s, i), t in rows.items()], np.int64).reshape(-1, 5)
        journal.spans = np.array([[k, 0, start, n] for k, start, n in spans], np.int64).reshape(-1, 4)
        journal.begin, journal.end = 0, 60
        journals.append(journal)
    timeline = merge(journals)

    caused = dict.fromkeys(range(len(workers)), 0)
    for rank, (rows, spans) in enumerate(workers):
        kinds: dict[str, set[int]] = {kind: set() for kind in PRIORITY}
        for key, (_, blocked, done) in rows.items():
            split = blocked
            if all(key in other for other, _ in workers):
                arrivals = [other[key][0] for other, _ in workers]
                split = min(max(max(arrivals), blocked), done)
                last = arrivals.index(max(arrivals))
                caused[last] += (split - blocked) * (last != rank)
            kinds["wait"] |= set(range(blocked, split))
            kinds["communicate"] |= set(range(split, done))
        for code, start, length in spans:
            kinds[SPANS[code]] |= set(range(start, start + length))
        taken: set[int] = set()
        expected = {}
        for kind in PRIORITY:
            expected[kind] = len(kinds[kind] - taken)
            taken |= kinds[kind]
        expected["idle"] = 60 - len(taken)
        found = {kind: round(value * 1e9) for kind, value in timeline.lives[rank].seconds.items()}
        assert found == {kind: expected[kind] for kind in KINDS}
    assert {who[1]: round(value * 1e9) for who, value in timeline.caused.items()} == caused


def test_a_slow_worker_is_waited_for(tmp_path: Path) -> None:
    write_run(tmp_path, workers=3, slow=1, steps=100, validate_every=50)
    timeline = merge(read(tmp_path / "journal"))
    for life in timeline.lives:
        slow = life.who == (0, 1)
        assert life.steps == 100
        assert life.seconds["wait"] == pytest.approx(0 if slow else 1.0)
        assert life.seconds["compute"] == pytest.approx(2.1 if slow else 1.1)
        assert life.seconds["communicate"] == pytest.approx(0.3)
        assert life.seconds["data"] == pytest.approx(0.2)
        assert life.seconds["validate"] == pytest.approx(0.1)
        assert life.seconds["start"] == pytest.approx(0.1)
        assert sum(life.seconds.values()) == pytest.approx(life.total)
    assert timeline.caused == pytest.approx({(0, 0): 0.0, (0, 1): 2.0, (0, 2): 0.0})
    assert timeline.unsplit == 0
    assert not timeline.estimated


def test_the_mean_over_workers_adds_up_over_generations(tmp_path: Path) -> None:
    write_run(tmp_path, workers=2, steps=10)
    write_run(tmp_path, workers=4, first=10, steps=20, generation=2)
    timeline = merge(read(tmp_path / "journal"))
    seconds = timeline.seconds
    assert sum(seconds[kind] for kind in KINDS) == pytest.approx(seconds["total"])
    assert seconds["compute"] == pytest.approx(30 * 0.011)
    assert timeline.workers[0, 0]["steps"] == 30
    assert timeline.workers[0, 3]["steps"] == 20


def test_clocks_of_several_hosts_are_not_compared(tmp_path: Path) -> None:
    write_run(tmp_path, slow=0, steps=10, hosts=True)
    timeline = merge(read(tmp_path / "journal"))
    assert not timeline.wait_measured
    assert timeline.seconds["wait"] == 0
    assert timeline.seconds["communicate"] == pytest.approx(10 * (3 + 13) / 2 / 1e3, rel=0.2)
    assert sum(timeline.caused.values()) == 0


def test_a_collective_that_not_all_recorded_is_not_split(tmp_path: Path) -> None:
    write_run(tmp_path, slow=1, steps=10)
    journals = read(tmp_path / "journal")
    journals[1].collectives = journals[1].collectives[:-1]
    timeline = merge(journals)
    assert timeline.unsplit == pytest.approx(0.013)
    assert timeline.lives[0].seconds["wait"] == pytest.approx(0.09)
    assert timeline.lives[0].seconds["communicate"] == pytest.approx(0.027 + 0.013)


def test_a_thinned_journal_is_extrapolated(tmp_path: Path) -> None:
    """Two workers whose journals reach their limits at different steps: as if all had been recorded."""
    steps, length = 40_000, 4000
    for rank, limit in ((0, 0.5), (1, 0.8)):
        journal = Journal(tmp_path / "journal", "worker", rank, 1, limit_mb=limit)
        start = 10**15
        for step in range(steps):
            at = start + step * length
            journal.add("compute", step, at, at + 2000)
            journal.collective(step, 0, at + 2000 + 500 * rank, at + 2000, at + 3000)
            if step % 200 == 0:
                journal.flush()
        journal.close()
    journals = read(tmp_path / "journal")
    assert all(len(j.thinned) for j in journals)
    assert len(journals[0].spans) < steps / 4
    for journal in journals:
        journal.begin, journal.end = start, start + steps * length
    timeline = merge(journals)
    assert timeline.estimated
    assert timeline.unsplit == 0
    seconds = timeline.lives[0].seconds
    covered = 1.0 if all(j.thinned[-1][1] != NEVER for j in journals) else None
    assert covered == 1.0
    assert seconds["compute"] == pytest.approx(steps * 2e-6, rel=0.01)
    assert seconds["wait"] == pytest.approx(steps * 0.5e-6, rel=0.01)
    assert seconds["communicate"] == pytest.approx(steps * 0.5e-6, rel=0.01)
    assert timeline.caused[0, 1] == pytest.approx(steps * 0.5e-6, rel=0.01)


def test_large_step_numbers_do_not_mix_collectives() -> None:
    journals = []
    for rank in range(2):
        journal = ProcessJournal(Path("x"), "worker", rank, 1, host="h")
        journal.collectives = np.array(
            [[1 << 61, (1 << 32) - 1, 10 + rank, 10, 20], [(1 << 61) + 1, 0, 30, 30, 40 * MS]], np.int64
        )
        journal.end = 40 * MS
        journals.append(journal)
    timeline = merge(journals)
    assert timeline.lives[0].seconds["wait"] == pytest.approx(1e-9)
    assert timeline.unsplit == 0


def test_collectives_of_some_workers_are_told_apart() -> None:
    """Of four workers the first two and the last two exchange, each pair for itself; the second of each comes late."""
    journals = []
    for rank in range(4):
        pair = [0, 1] if rank < 2 else [2, 3]
        journal = ProcessJournal(Path("x"), "worker", rank, 1, host="h")
        late = (rank % 2) * (3 if rank < 2 else 7) * MS
        journal.collectives = np.array([[0, index_among(pair, 4, 5), late, late, 10 * MS]], np.int64)
        journal.end = 10 * MS
        journals.append(journal)
    timeline = merge(journals)
    assert [round(life.seconds["wait"], 6) for life in timeline.lives] == [0.003, 0.0, 0.007, 0.0]
    assert timeline.unsplit == 0


# -- pipelines -------------------------------------------------------------------------------------------------------


def test_a_pipeline_with_one_micro_batch_waits_for_its_neighbours(tmp_path: Path) -> None:
    """Two stages, F 2 ms and B 4 ms each, a message 1 ms: the first waits for the other's 6 ms, the other for 2."""
    write_pipeline(tmp_path, ranks=2, micro_batches=1, steps=11, message=1.0)
    timeline = merge(read(tmp_path / "journal"))
    first, second = timeline.lives
    factor = 10 + 10  # the first step is ten times as long
    assert first.steps == second.steps == 11
    assert first.seconds["compute"] == pytest.approx((6 * factor + 3 * 11) / 1e3)
    assert second.seconds["compute"] == pytest.approx((6 * factor + 3 * 11) / 1e3)
    # From the end of its forward pass on: a message, both passes of the other, a message.
    assert first.seconds["wait"] == pytest.approx(7 * factor / 1e3)
    assert first.seconds["communicate"] == pytest.approx(1 * factor / 1e3)
    assert second.seconds["wait"] == pytest.approx(2 * factor / 1e3)
    assert second.seconds["communicate"] == pytest.approx(1 * factor / 1e3)
    assert timeline.caused == pytest.approx({(0, 0): 2 * factor / 1e3, (0, 1): 7 * factor / 1e3})
    assert timeline.unsplit == 0


@pytest.mark.parametrize("outermost", [False, True])
@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("interleaved", 2), ("interleaved_zero_bubble", 2)])
def test_each_of_several_pipelines_has_its_own_neighbours(
    tmp_path: Path, outermost: bool, schedule: str, chunks: int
) -> None:
    shape: dict[str, Any] = {"ranks": 3, "chunks": chunks, "micro_batches": 5, "message": 0.5}
    write_pipeline(tmp_path / "one", schedule, **shape)
    write_pipeline(tmp_path / "three", schedule, **shape, replicas=3, outermost=outermost)
    one, three = (merge(read(tmp_path / name / "journal")) for name in ("one", "three"))
    assert one.unsplit == three.unsplit == 0
    assert min(life.seconds["wait"] for life in one.lives) > 0
    for worker, life in enumerate(three.lives):
        same = one.lives[worker // 3 if outermost else worker % 3]
        for kind in ("compute", "wait", "communicate"):
            assert life.seconds[kind] == pytest.approx(same.seconds[kind]), kind


def test_a_message_whose_sender_recorded_nothing_is_not_split(tmp_path: Path) -> None:
    write_pipeline(tmp_path, ranks=2, micro_batches=1, steps=11, message=1.0)
    journals = read(tmp_path / "journal")
    last = journals[1].actions[:, 0] == 10
    journals[1].actions = journals[1].actions[~last]
    timeline = merge(journals)
    assert timeline.unsplit == pytest.approx(0.008)
    assert timeline.lives[0].seconds["wait"] == pytest.approx(7 * 19 / 1e3)
    assert timeline.lives[0].seconds["communicate"] == pytest.approx(19 / 1e3 + 0.008)


def test_pipelines_over_several_hosts_are_not_compared(tmp_path: Path) -> None:
    write_pipeline(tmp_path, ranks=2, micro_batches=1, steps=11, message=1.0, hosts=True)
    timeline = merge(read(tmp_path / "journal"))
    assert not timeline.wait_measured
    assert timeline.seconds["wait"] == 0
    assert timeline.lives[0].seconds["communicate"] == pytest.approx(8 * 20 / 1e3)
    assert sum(timeline.caused.values()) == 0
