"""The summary of invented runs, and what it says held them back."""

from __future__ import annotations

import itertools
import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs import MS, write_run

from verbund.observe.directions import best, larger_is_better
from verbund.observe.events import Journal
from verbund.observe.journal import read
from verbund.observe.summary import failures, summarise, thin


def test_the_fields_of_a_run(tmp_path: Path) -> None:
    write_run(tmp_path, steps=100, slow=1, validate_every=50)
    summary = summarise(tmp_path, status="done", strategy={"mesh": {"data": 2}}, world=2, ended_by="steps")
    assert (summary["status"], summary["world"], summary["generations"], summary["ended_by"]) == ("done", 2, 1, "steps")
    assert summary["run"] == str(tmp_path.resolve())
    assert (summary["steps"], summary["samples"]) == (100, 800)
    loss = summary["loss"]
    assert (loss["first"], loss["last"], loss["curve_stride"]) == (1.0, 0.01, 1)
    assert loss["curve"] == [[step, pytest.approx(1 / (step + 1))] for step in range(100)]
    accuracy = summary["metrics"]["accuracy"]
    assert accuracy["curve"] == [[50, pytest.approx(1 - 1 / 51)], [100, pytest.approx(1 - 1 / 101)]]
    assert accuracy["best"] == accuracy["last"]
    assert summary["metrics"]["loss"]["best"] == pytest.approx(0.01)
    assert summary["metrics"]["confusion_matrix"]["last"] == [[3, 1], [0, 4]]
    seconds = summary["seconds"]
    assert sum(value for kind, value in seconds.items() if kind != "total") == pytest.approx(seconds["total"], abs=1e-5)
    assert seconds["wait"] == pytest.approx(0.5)
    assert summary["samples_per_second"] == pytest.approx(800 / (100 * 0.026), rel=0.01)
    assert summary["bytes"]["sent"] == 300
    assert summary["bytes"]["per_process"]["worker 1"]["sent"] == 200
    assert summary["peak_memory_bytes"] == {"worker 0": 1_000_000, "worker 1": 2_000_000}
    assert summary["failures"] == []
    assert summary["not_measured"] == ["Energy: no readable counter, or none was read."]
    json.dumps(summary, allow_nan=False)


def test_a_later_generation_replaces_what_it_did_again(tmp_path: Path) -> None:
    write_run(tmp_path, steps=80, loss=1.0, validate_every=20)
    write_run(tmp_path, first=50, steps=10, generation=2, loss=3.0, validate_every=20)
    summary = summarise(tmp_path, status="interrupted")
    assert summary["steps"] == 60  # what generation 1 did beyond step 50 was lost
    curve = summary["loss"]["curve"]
    assert [step for step, _ in curve] == list(range(60))
    assert curve[49][1] == pytest.approx(1 / 50)
    assert curve[50][1] == pytest.approx(3 / 51)
    assert [step for step, _ in summary["metrics"]["loss"]["curve"]] == [20, 40, 60]
    assert summary["metrics"]["loss"]["last"] == pytest.approx(3 / 60)
    assert summary["generations"] == 2
    assert summary["seconds"]["compute"] == pytest.approx(90 * 0.011)


def test_a_generation_that_did_nothing_takes_nothing_away(tmp_path: Path) -> None:
    write_run(tmp_path, steps=10)
    Journal(tmp_path / "journal", "worker", 0, 2).close()
    assert summarise(tmp_path, status="failed")["steps"] == 10


@pytest.mark.parametrize("lost", [(0, 4), (6, 10), (3, 5)])
def test_steps_that_were_not_recorded_are_told(lost: tuple[int, int], tmp_path: Path) -> None:
    """The workers have counted them; the journal on a full disk has not."""
    write_run(tmp_path, steps=10)
    (path,) = (tmp_path / "journal").glob("worker-0-*")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line["t"] == "steps":
            line["rows"] = [row for row in line["rows"] if not lost[0] <= row[0] < lost[1]]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = summarise(tmp_path, status="done", trained={"steps": 10, "samples": 80})
    assert (summary["steps"], summary["samples"]) == (10, 80)
    said = f"{lost[1] - lost[0]} of 10 steps were not recorded"
    assert any(said in line and "samples are as the workers counted" in line for line in summary["not_measured"])
    summary = summarise(tmp_path, status="failed")  # nobody has counted them
    assert any("not recorded" in line for line in summary["not_measured"]) == (lost[1] < 10)


def test_a_run_without_a_journal(tmp_path: Path) -> None:
    summary = summarise(tmp_path, status="failed", cause={"what": "x"}, world=2)
    assert (summary["steps"], summary["samples"], summary["loss"]["first"]) == (0, 0, None)
    assert summary["bytes"] == {
        "sent": None,
        "received": None,
        "shared": None,
        "how": "not measured",
        "per_process": {},
    }
    assert "not measured" in summary["held_back"][0]
    assert summarise(tmp_path, status="failed")["world"] == 0
    json.dumps(summary, allow_nan=False)


def test_values_that_are_no_numbers_become_null(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal", "worker", 0, 1)
    journal.step(0, math.nan, 1.0, 1, 1e-3)
    journal.event("validation", step=1, metrics={"loss": math.inf, "auc": math.nan})
    journal.close()
    summary = summarise(tmp_path, status="failed")
    assert summary["loss"]["curve"] == [[0, None]]
    assert summary["metrics"]["loss"]["last"] is None
    assert summary["metrics"]["auc"]["best"] is None
    json.dumps(summary, allow_nan=False)


def test_long_curves_are_thinned_unless_asked_whole(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal", "worker", 0, 1)
    for step in range(5001):
        journal.step(step, float(step), 1.0, 1, 1e-3)
    journal.close()
    loss = summarise(tmp_path, status="done")["loss"]
    assert len(loss["curve"]) <= 2000
    assert (loss["curve"][0][0], loss["curve"][-1][0], loss["curve_stride"]) == (0, 5000, 3)
    assert len(summarise(tmp_path, status="done", whole_curves=True)["loss"]["curve"]) == 5001


@given(st.integers(0, 400), st.integers(2, 50))
def test_thinning_keeps_first_and_last_within_the_limit(count: int, limit: int) -> None:
    points: list[list[Any]] = [[index, 0.0] for index in range(count)]
    kept, stride = thin(points, limit)
    assert len(kept) <= max(limit, 0)
    assert kept[:1] == points[:1]
    assert kept[-1:] == points[-1:]
    assert all(b[0] - a[0] == stride for a, b in itertools.pairwise(kept[:-1]))


def test_failures_come_in_order_and_tracebacks_only_when_asked(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal", "supervisor", 0, 1)
    error = {"kind": "RunFailed", "what": "boom", "where": None, "fix": None}
    journal.event("failure", process="worker 1", error=error, secondary=False, trace="Traceback …")
    journal.event("checkpoint_failed", step=7, failure="no space left")
    journal.close()
    journals = read(tmp_path / "journal")
    first, second = failures(journals)
    assert (first["process"], first["error"]["what"], "trace" in first) == ("worker 1", "boom", False)
    assert "step 7" in second["error"]["what"]
    assert failures(journals, traces=True)[0]["trace"] == "Traceback …"


# -- what held the run back --------------------------------------------------------------------------------------


def held_back(tmp_path: Path, **how: Any) -> str:
    write_run(tmp_path, **how)
    return "\n".join(summarise(tmp_path, status="done")["held_back"])


def test_a_short_start_is_not_zero_seconds(tmp_path: Path) -> None:
    assert "starting (0.1 s until the first step)" in held_back(tmp_path, steps=5)


def test_a_slow_worker_is_named_with_what_it_did(tmp_path: Path) -> None:
    text = held_back(tmp_path, workers=3, slow=1, steps=100, validate_every=1000)
    assert "waiting for worker 1, which spent 1.0 s more per 100 steps computing" in text
    assert text.startswith("25 %")


def test_even_workers_are_not_blamed(tmp_path: Path) -> None:
    assert "waiting for worker" not in held_back(tmp_path, steps=100)


def test_data_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text("[data]\nloaders = 0\n")
    assert "waiting for data: set `data.loaders`" in held_back(tmp_path, steps=100)
    (tmp_path / "job.toml").write_text("[data]\nloaders = 3\n")
    assert "raise `data.loaders` (now 3)" in "\n".join(summarise(tmp_path, status="done")["held_back"])


def test_hosts_with_clocks_of_their_own(tmp_path: Path) -> None:
    write_run(tmp_path, slow=1, steps=50, hosts=True, validate_every=1000)
    summary = summarise(tmp_path, status="done")
    assert summary["seconds"]["wait"] is None
    assert "clocks of their own" in summary["held_back"][0]
    assert any(text.startswith("Waiting:") for text in summary["not_measured"])


def test_a_run_that_only_computes_has_nothing_to_gain(tmp_path: Path) -> None:
    for rank in range(2):
        journal = Journal(tmp_path / "journal", "worker", rank, 1)
        start = journal_start(journal)
        for step in range(100):
            journal.add("compute", step, start + step * 10 * MS, start + (step + 1) * 10 * MS)
        journal.close()
    text = "\n".join(summarise(tmp_path, status="done")["held_back"])
    assert text.startswith("Computing is 100 %")
    assert "nothing to gain from the network" in text


def journal_start(journal: Journal) -> int:
    return json.loads(journal.path.read_text().splitlines()[0])["monotonic"]


# -- directions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["accuracy", "top_5", "top5", "f1", "f1_macro", "roc_auc", "r2", "recall", "precision", "val_accuracy", "new"],
)
def test_scores(name: str) -> None:
    assert larger_is_better(name)
    assert best(name, [0.5, math.nan, 0.75, 0.25]) == 0.75


@pytest.mark.parametrize(
    "name", ["loss", "validation_loss", "rmse", "mae", "mse", "perplexity", "error_rate", "top_1_error"]
)
def test_losses(name: str) -> None:
    assert not larger_is_better(name)
    assert best(name, [0.5, math.nan, 0.75, 0.25]) == 0.25


def test_a_step_that_a_replacement_does_again_counts_once(tmp_path: Path) -> None:
    """Islands share each step; one's worker was killed after it had recorded its share of the second."""
    for island, life, steps in ((0, 0, (0, 1)), (0, 1, (1, 2)), (1, 0, (0, 1, 2))):
        journal = Journal(tmp_path / "journal", "worker", island, 1, island=island, life=life)
        for step in steps:
            journal.step(step, 1.0, 8.0, 8, 0.1)
        journal.close()
    summary = summarise(tmp_path, status="done", strategy={}, world=2, ended_by="steps")
    assert (summary["steps"], summary["samples"]) == (3, 48)


def test_a_whole_ticket_that_another_island_does_again_counts_once(tmp_path: Path) -> None:
    """An island of an asynchronous run was killed after it had recorded a step of which the coordinator knew nothing:
    another did it again, and what servers took is what the first had computed."""
    for island, rows in ((1, [(1, 3.0), (2, 5.0)]), (0, [(0, 4.0), (2, 7.0), (3, 2.0)])):
        journal = Journal(tmp_path / "journal", "worker", island, 1, island=island)
        journal.event("tickets", whole=True)
        for step, loss in rows:
            now = time.monotonic_ns()
            journal.add("compute", step, now, now + 1)
            journal.step(step, loss, 8.0, 8, 0.1)
        if island == 0:
            journal.close()
        else:
            journal.flush()
    summary = summarise(tmp_path, status="done", strategy={}, world=2, ended_by="steps")
    assert (summary["steps"], summary["samples"]) == (4, 32)
    assert [loss for _, loss in summary["loss"]["curve"]] == [4.0, 3.0, 5.0, 2.0]
