"""The time of day may jump: nothing that is waited for, measured or ordered depends on it."""

from __future__ import annotations

import ast
import itertools
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import verbund
from conftest import MLP, losses
from verbund.observe.journal import read
from verbund.run import Run

HOUR = 3600.0
# The clock of the day is shown to people, written into tokens and policies that speak of days, or compared with files'.
SHOWN = {
    "cluster/supplying.py",  # how old a file is that a killed process has left
    "observe/events.py",
    "observe/tensorboard.py",
    "exchange/federated/enrolment.py",
    "stage/federated/conversation.py",
    "stage/doctor.py",
    "data/fingerprint.py",
}
JUMPS = (
    MLP
    + """
import itertools, time, torch
steps = itertools.count()
true = time.time

def inputs(batch):
    ahead = (0, 3600, -3600)[next(steps) % 3]
    time.time = lambda: true() + ahead
    time.time_ns = lambda: int(1e9 * time.time())
    return batch["x"]
"""
)


def test_a_run_whose_clocks_jump_is_as_any_other(run_job: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {
        "strategy.mesh": {"data": 2},
        "train.steps": 12,
        "checkpoint.every": 3,
        "validate.every": 3,
        "data.validation_fraction": 0.2,
        "cluster.heartbeat": 0.05,
        "cluster.lost_after": 5.0,
        "cluster.replacements": 3,
    }
    calm = run_job(MLP, changes)
    true, ahead = time.time, itertools.cycle((0.0, HOUR, -HOUR))
    monkeypatch.setattr(time, "time", lambda: true() + next(ahead))
    run = run_job(JUMPS, changes)
    monkeypatch.undo()
    summary = run.summary
    assert (summary["status"], summary["steps"], summary["attempt"], summary["failures"]) == ("done", 12, 1, [])
    assert losses(run) == losses(calm)
    assert 0 < summary["seconds"]["total"] < 120
    steps = [step for step, _ in summary["metrics"]["loss"]["curve"]]
    assert steps == sorted(steps) == [3, 6, 9, 12]
    for journal in read(run.journal):
        told = [(event["at"], event["wall"]) for event in journal.events]
        spans = [later[1] - earlier[1] - (later[0] - earlier[0]) / 1e9 for earlier, later in itertools.pairwise(told)]
        assert all(abs(span) < 1e-3 for span in spans)


def test_who_asks_for_the_time_of_day() -> None:
    """A deadline or a pause by that clock would be hit by a jump."""
    asked = set()
    root = Path(verbund.__file__).parent
    for file in root.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                name = f"{node.value.id}.{node.attr}"
                if name in {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "date.today"}:
                    asked.add(str(file.relative_to(root)))
    assert asked <= SHOWN
    assert "observe/events.py" in asked
