"""What is measured of pipelines: against the times that were written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import write_pipeline, write_run

from verbund.mesh.pipeline.schedule import bubble
from verbund.observe.events import Journal
from verbund.observe.journal import read
from verbund.observe.pipeline import pipelines, typical
from verbund.observe.summary import summarise

MS = 1e-3


@pytest.mark.parametrize(
    ("schedule", "ranks", "chunks", "micro_batches"),
    [
        ("gpipe", 4, 1, 4),
        ("1f1b", 3, 1, 5),
        ("interleaved", 2, 3, 4),
        ("zero_bubble", 4, 1, 8),
        ("interleaved_zero_bubble", 2, 2, 5),
        ("1f1b", 1, 1, 3),
    ],
)
def test_what_is_measured_is_what_the_schedule_promised(
    tmp_path: Path, schedule: str, ranks: int, chunks: int, micro_batches: int
) -> None:
    write_pipeline(tmp_path, schedule, ranks=ranks, chunks=chunks, micro_batches=micro_batches)
    summary = summarise(tmp_path, status="done")
    found = summary["pipeline"]
    shape = [found[key] for key in ("schedule", "ranks", "stages", "micro_batches")]
    assert shape == [schedule, ranks, ranks * chunks, micro_batches]
    expected = pytest.approx(bubble(schedule, ranks, chunks, micro_batches), abs=1e-5)
    assert found["bubble"] == {"measured": expected, "theory": expected, "equal_stages": expected}
    # The first micro-batch goes through all stages; with several chunks it has to wait for others in between.
    assert found["first_output_seconds"] >= 2 * ranks * chunks * MS - 1e-9
    if chunks == 1:
        assert found["first_output_seconds"] == pytest.approx(2 * ranks * MS)
    assert found["samples_per_second"] == summary["samples_per_second"]
    kinds = "FIW" if "zero" in schedule else "FB"
    per_stage = {kind: pytest.approx({"F": 2, "B": 4, "I": 2, "W": 2}[kind] * MS) for kind in kinds}
    assert found["stage_seconds"] == [per_stage] * (ranks * chunks)
    assert not any("bubble" in line for line in summary["not_measured"])
    json.dumps(summary, allow_nan=False)


def test_uneven_stages_and_messages_are_told_apart_from_the_schedule(tmp_path: Path) -> None:
    write_pipeline(tmp_path, ranks=4, micro_batches=12, slow=2, message=1.0)
    summary = summarise(tmp_path, status="done")
    found = summary["pipeline"]["bubble"]
    costs = [2.0, 2.0, 6.0, 2.0], [4.0, 4.0, 12.0, 4.0]
    assert found["equal_stages"] == pytest.approx(bubble("1f1b", 4, 1, 12), abs=1e-5)
    assert found["theory"] == pytest.approx(bubble("1f1b", 4, 1, 12, *costs), abs=1e-5)
    assert found["measured"] == pytest.approx(bubble("1f1b", 4, 1, 12, *costs, 1.0), abs=1e-5)
    assert found["equal_stages"] < found["theory"] < found["measured"]
    (said,) = [line for line in summary["held_back"] if "waiting" in line]
    assert "In the pipeline, 4 workers are idle for 5" in said
    assert "`1f1b` with 12 micro-batches brings 20 %" in said
    assert "stage 2 takes 2.0 times the mean" in said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"micro_batches": 2}, "More micro-batches of fewer samples"),
        ({"micro_batches": 8, "message": 20.0}, "comes from messages"),
    ],
)
def test_what_makes_a_pipeline_wait_is_said(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    write_pipeline(tmp_path, **{"ranks": 3, **changes})
    assert any(said in line for line in summarise(tmp_path, status="done")["held_back"])


def test_several_pipelines_count_together_and_uneven_steps_do_not(tmp_path: Path) -> None:
    write_pipeline(tmp_path, ranks=2, micro_batches=4, replicas=2, steps=9)
    journals = read(tmp_path / "journal")
    for journal in journals:
        # A step with fewer micro-batches, and one that was not finished.
        of = journal.actions
        journal.actions = of[~((of[:, 0] == 6) & (of[:, 3] == 3)) & ~((of[:, 0] == 8) & (of[:, 1] == 1))]
    found = pipelines(journals)
    assert found is not None
    assert [np.unique(rows[:, 0]).tolist() for rows in found.whole] == [[3, 4, 5, 7]] * 2
    measured = summarise(tmp_path, status="failed", journals=journals)["pipeline"]["bubble"]["measured"]
    assert measured == pytest.approx(bubble("1f1b", 2, 1, 4), abs=1e-5)
    assert len(typical(found)) == 2 * 2 * 4


def test_a_run_of_one_step_is_measured_by_it(tmp_path: Path) -> None:
    write_pipeline(tmp_path, ranks=2, micro_batches=4, steps=1)
    assert summarise(tmp_path, status="done")["pipeline"]["bubble"]["measured"] == pytest.approx(0.2)


def test_the_median_step_is_typical(tmp_path: Path) -> None:
    write_pipeline(tmp_path, ranks=2, micro_batches=4, steps=8)
    journals = read(tmp_path / "journal")
    for journal in journals:
        for step, delay in ((3, 0), (4, 10), (5, 2), (6, 3), (7, 1)):
            late = (journal.actions[:, 0] == step) & (journal.actions[:, 3] == 3) & (journal.actions[:, 1] == 1)
            journal.actions[late, 4] += delay
    found = pipelines(journals)
    assert found is not None
    rows = typical(found)
    assert set(rows[:, 0].tolist()) == {5}
    assert (np.diff(rows[:, 4]) >= 0).all()


def test_clocks_of_several_hosts_leave_it_unmeasured(tmp_path: Path) -> None:
    write_pipeline(tmp_path, ranks=2, hosts=True)
    summary = summarise(tmp_path, status="done")
    found = summary["pipeline"]
    assert found["bubble"]["measured"] is found["first_output_seconds"] is None
    assert found["bubble"]["theory"] == pytest.approx(0.2)
    assert any(line.startswith("The pipeline's bubble") for line in summary["not_measured"])


def test_a_run_without_a_pipeline_says_nothing_of_one(tmp_path: Path) -> None:
    write_run(tmp_path, steps=5)
    summary = summarise(tmp_path, status="done")
    assert summary["pipeline"] is None
    assert summary["memory_promise"] is None


@pytest.mark.parametrize(
    "event",
    [
        {},
        {"schedule": "none", "ranks": 2, "chunks": 1, "micro_batches": 4},
        {"schedule": "1f1b", "ranks": 2, "chunks": 2, "micro_batches": 4},
        {"schedule": "1f1b", "ranks": "2", "chunks": 1, "micro_batches": 4},
        {"schedule": "1f1b", "ranks": 2, "chunks": 1, "micro_batches": 0},
        {"schedule": "interleaved", "ranks": 1 << 20, "chunks": 1 << 20, "micro_batches": 4},
        {"schedule": "1f1b", "ranks": 2, "chunks": 1, "micro_batches": 1 << 50},
    ],
)
def test_an_event_that_cannot_be_is_passed_over(tmp_path: Path, event: dict[str, Any]) -> None:
    journal = Journal(tmp_path / "journal", "worker", 0, 1)
    journal.event("pipeline", **event)
    journal.action(0, "F", 0, 0, 1, 2)
    journal.close()
    assert summarise(tmp_path, status="done")["pipeline"] is None


def test_a_pipeline_too_large_to_simulate_has_no_theory(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal", "worker", 0, 1)
    journal.event("pipeline", schedule="1f1b", ranks=1, chunks=1, micro_batches=1 << 20)
    journal.action(0, "F", 0, 0, 1, 2)
    journal.close()
    found = summarise(tmp_path, status="done")["pipeline"]
    assert found["bubble"] == {"measured": None, "theory": None, "equal_stages": None}


def test_what_each_worker_holds_is_compared_with_one_process(tmp_path: Path) -> None:
    write_pipeline(tmp_path, ranks=2, steps=3)
    write_run(tmp_path, workers=2, generation=2, steps=3)
    for rank in range(2):
        journal = Journal(tmp_path / "journal", "worker", rank, 2)
        held = {"parameters": 400 + rank, "gradients": 400, "optimizer": 800, "ema": 0, "buffers": 8}
        journal.totals("held", **held, whole=3216)
        journal.close()
    summary = summarise(tmp_path, status="done")
    promise = summary["memory_promise"]
    assert promise["whole"] == 3216
    assert list(promise["workers"]) == ["worker 0", "worker 1"]
    one = promise["workers"]["worker 1"]
    assert one["held"] == {"parameters": 401, "gradients": 400, "optimizer": 800, "ema": 0, "buffers": 8}
    assert (one["total"], one["peak"]) == (1609, 2_000_000)
    assert one["share"] == pytest.approx(1609 / 3216, abs=1e-6)
