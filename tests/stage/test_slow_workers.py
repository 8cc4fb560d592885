"""Slow workers are told of while training goes on: once, when it persists, with the cause."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from verbund.job import Stragglers
from verbund.mesh.axes import Mesh
from verbund.run import Run
from verbund.stage.slow_workers import WINDOW_SECONDS, WINDOWS, SlowWorkers

Told = Callable[[int, int], tuple[float, float]]
"""Of a worker and a step: its own seconds, and those of them for data."""


def notes(told: Told, mesh: Mesh, steps: int = 300, joint: bool = True, samples: int = 8) -> list[str]:
    """What is said during steps of 0.1 s and more."""
    now = 0.0
    slow = SlowWorkers(mesh, joint, range(mesh.world), clock=lambda: now)
    workers = mesh.size("islands", "data", "shard") if joint else mesh.size("data", "shard")
    found = []
    for step in range(steps):
        every = [told(worker, step) for worker in range(workers)]
        now += max(own for own, _ in every) + 0.01
        found += slow.record([samples] * workers, [value for each in every for value in each])
    return found


def test_slow_compute() -> None:
    (text,) = notes(lambda worker, step: (0.39 if worker == 3 else 0.1, 0.01), Mesh(data=4))
    assert text.startswith("worker 3 is 3.9 times slower than the others: slow compute. It costs 72 % of each step; ")
    assert "rebalance" in text


def test_slow_data() -> None:
    (text,) = notes(lambda worker, step: (0.3, 0.22) if worker == 0 else (0.1, 0.01), Mesh(data=2))
    assert text.startswith("worker 0 is 3.0 times slower than the others: slow data")
    assert "rebalance" not in text


def test_what_passes_is_not_told() -> None:
    assert not notes(lambda worker, step: (0.4 if worker == 1 and step % 60 < 15 else 0.1, 0.0), Mesh(data=4))
    assert not notes(lambda worker, step: (0.13 if worker == 1 else 0.1, 0.0), Mesh(data=4))


def test_a_worker_that_is_slow_with_few_samples() -> None:
    now = 0.0
    slow = SlowWorkers(Mesh(data=2), True, range(2), Stragglers(name="rebalance"), lambda: now)
    found = []
    for _ in range(100):
        now += 0.41
        found += slow.record([199, 1], [0.1, 0.0, 0.4, 0.0])
    (text,) = found
    assert text == (
        "worker 1 is 4.0 times as slow as the others in a step, with 1 sample to their 199: slow compute. It "
        "costs 73 % of each step; without it the others might be faster"
    )


def test_each_window_must_be_so() -> None:
    assert not notes(lambda worker, step: (0.4 if worker == 1 else 0.1, 0.0), Mesh(data=4), steps=8 * (WINDOWS - 1))


def test_workers_with_the_same_samples_are_named_together() -> None:
    (text,) = notes(lambda worker, step: (0.4 if worker == 1 else 0.1, 0.0), Mesh(data=2, tensor=2))
    assert text.startswith("workers 2 and 3 are 4.0 times slower")
    mesh = Mesh(rank=2, islands=2, data=2)
    (text,) = notes(lambda worker, step: (0.4 if worker == 1 else 0.1, 0.0), mesh, joint=False)
    assert text.startswith("worker 3 is")


SLOW = """
import functools, json, os, time
from pathlib import Path
from torch import nn

def model():
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 5))

@functools.cache
def slow():
    # A worker's journal bears its process.
    (path,) = Path(__file__).parent.glob("run-*/journal/worker-1-*.jsonl")
    with open(path) as lines:
        return json.loads(next(lines))["pid"] == os.getpid()

calls = 0

def inputs(batch):
    global calls
    calls += 1
    if calls > 3:
        time.sleep(0.08 if slow() else 0.01)
    return batch["x"]
"""


EVERYWHERE: dict[str, dict[str, Any]] = {
    "islands that average": {"strategy.islands": 3, "strategy.exchange": {"name": "local_sgd", "every": 5}},
    "servers": {"strategy.islands": 3, "strategy.exchange": "parameter_server"},
}


@pytest.mark.parametrize("how", EVERYWHERE)
def test_the_summary_finds_it_under_any_strategy(how: str, run_job: Callable[..., Run]) -> None:
    run = run_job(SLOW, {"train.steps": 30, **EVERYWHERE[how]})
    found = run.summary["stragglers"]
    (only,) = found["found"]
    assert (only["rank"], only["cause"]) == (1, "compute")
    assert found["lost_seconds"] == pytest.approx(0.07 * 27, rel=0.5)


def test_a_run_tells_it(run_job: Callable[..., Run]) -> None:
    """A worker that really is slower: a note while it runs, once, and what it cost in summary and report."""
    changes = {"train.steps": None, "train.seconds": WINDOWS * WINDOW_SECONDS + 3.0, "strategy.mesh": {"data": 3}}
    run = run_job(SLOW, changes)
    (note,) = [text for text in run.summary["notes"] if "slower than the others" in text]
    assert note.startswith("worker 1 is")
    assert "slow compute" in note
    found = run.summary["stragglers"]
    (only,) = found["found"]
    assert (only["rank"], only["cause"]) == (1, "compute")
    assert only["slower"] > 2
    # 0.07 s in every step but the first few, against the steps that there were.
    assert found["lost_seconds"] == pytest.approx(0.07 * run.summary["steps"], rel=0.5)
    assert "slow compute" in (run.path / "report.html").read_text()
