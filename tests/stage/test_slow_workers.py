"""Slow workers are told of while training goes on: once, when it persists, with the cause."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from verbund.job import Exchange, Stragglers, Strategy
from verbund.mesh.axes import Mesh
from verbund.run import Run
from verbund.stage import slow_workers
from verbund.stage.paces import Paces
from verbund.stage.slow_workers import WINDOWS, SlowWorkers

Told = Callable[[int, int], tuple[float, float]]
"""Of a worker and a step: its own seconds, and those of them for data."""
JOINT = Strategy(mesh={"data": 4})


def notes(told: Told, workers: int = 4, steps: int = 300, strategy: Strategy = JOINT, samples: int = 8) -> list[str]:
    """What is said during steps of 0.1 s and more, all of whose workers wait for the slowest."""
    now = 0.0
    slow = SlowWorkers(strategy, lambda: now)
    found = []
    for step in range(steps):
        every = [told(worker, step) for worker in range(workers)]
        now += max(own for own, _ in every) + 0.01
        found += slow.record([[[worker], 1, samples, own, data] for worker, (own, data) in enumerate(every)])
    return found


def test_slow_compute() -> None:
    (text,) = notes(lambda worker, step: (0.39 if worker == 3 else 0.1, 0.01))
    assert text.startswith("worker 3 is 3.9 times slower than the others: slow compute. It costs 72 % of each step; ")
    assert "rebalance" in text


def test_slow_data() -> None:
    (text,) = notes(lambda worker, step: (0.3, 0.22) if worker == 0 else (0.1, 0.01), workers=2)
    assert text.startswith("worker 0 is 3.0 times slower than the others: slow data")
    assert "rebalance" not in text


def test_what_passes_is_not_told() -> None:
    assert not notes(lambda worker, step: (0.4 if worker == 1 and step % 60 < 15 else 0.1, 0.0))
    assert not notes(lambda worker, step: (0.13 if worker == 1 else 0.1, 0.0))


def test_a_worker_that_is_slow_with_few_samples() -> None:
    now = 0.0
    slow = SlowWorkers(Strategy(stragglers=Stragglers(name="rebalance")), lambda: now)
    found = []
    for _ in range(100):
        now += 0.41
        found += slow.record([[[0], 1, 199, 0.1, 0.0], [[1], 1, 1, 0.4, 0.0]])
    (text,) = found
    assert text == (
        "worker 1 is 4.0 times as slow as the others in a step, with 1 sample to their 199: slow compute. It "
        "costs 73 % of each step; without it the others might be faster"
    )


def test_each_window_must_be_so() -> None:
    assert not notes(lambda worker, step: (0.4 if worker == 1 else 0.1, 0.0), steps=10 * (WINDOWS - 1))


def test_workers_that_wait_for_nobody() -> None:
    """They tell each for itself, and do as many tickets as they can."""
    now = 0.0
    exchange = Exchange(name="parameter_server", consistency="asynchronous")
    slow = SlowWorkers(Strategy(islands=3, exchange=exchange), lambda: now)
    found = []
    for tick in range(1200):
        now = tick / 10
        for worker in range(3):
            if worker != 2 or tick % 4 == 0:
                found += slow.record([[[worker], 1, 8, 0.4 if worker == 2 else 0.1, 0.0]])
    assert found == ["worker 2 is 4.0 times slower than the others: slow compute. The others do not wait for it"]


def test_who_is_gone_is_not_waited_for() -> None:
    now = 0.0
    slow = SlowWorkers(JOINT, lambda: now)
    slow.record([[[7], 1, 8, 0.1, 0.0]])
    found = []
    for step in range(2000):
        now = step / 10
        found += slow.record([[[worker], 1, 8, 0.09 if worker == 1 else 0.02, 0.0] for worker in range(3)])
    assert len(found) == 1


def told_by(mesh: Mesh, joint: bool, members: list[int]) -> list[list[int]]:
    """Whom a worker of a mesh tells of, after a step in which that is due."""
    sent: list[list[Any]] = []

    class Supervised:
        def mention(self, kind: str, rows: list[list[Any]]) -> None:
            assert kind == "paces"
            sent.extend(rows)

    paces = Paces(Supervised(), mesh, joint, members)  # type: ignore[arg-type]
    paces._since -= 1
    size = mesh.size("islands", "data", "shard") if joint else mesh.size("data", "shard")
    paces.record([5] * size, [float(number) for number in range(2 * size)])
    assert all(row[1:] == [1, 5, 2.0 * at, 2.0 * at + 1] for at, row in enumerate(sent))
    return [row[0] for row in sent]


def test_workers_with_the_same_samples_are_told_of_together_by_the_first() -> None:
    assert told_by(Mesh(data=2, tensor=2), True, [0, 1, 2, 3]) == [[0, 1], [2, 3]]
    assert told_by(Mesh(rank=1, data=2, tensor=2), True, [0, 1, 2, 3]) == []
    assert told_by(Mesh(data=2, pipeline=2), True, [0, 1, 2, 3]) == [[0, 2], [1, 3]]
    assert told_by(Mesh(rank=2, islands=2, data=2), False, [0, 1, 2, 3]) == [[2], [3]]
    assert told_by(Mesh(rank=3, islands=2, data=2), False, [0, 1, 2, 3]) == []
    assert told_by(Mesh(data=2), True, [4, 7]) == [[4], [7]]


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
    "data": {"strategy.mesh": {"data": 3}},
    "islands that average": {"strategy.islands": 3, "strategy.exchange": {"name": "local_sgd", "every": 5}},
    "servers": {"strategy.islands": 3, "strategy.exchange": "parameter_server"},
}


@pytest.mark.parametrize("how", EVERYWHERE)
def test_a_run_tells_it(how: str, run_job: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that really is slower: a note while it runs, once, and what it cost in summary and report."""
    monkeypatch.setattr(slow_workers, "WINDOW_SECONDS", 0.3)
    monkeypatch.setattr(slow_workers, "WINDOW_STEPS", 3)
    steps = 45
    run = run_job(SLOW, {"train.steps": steps, **EVERYWHERE[how]})
    (note,) = [text for text in run.summary["notes"] if "slower than the others" in text]
    assert note.startswith("worker 1 is")
    assert "slow compute" in note
    assert ("rebalance" in note) == (how == "data")
    found = run.summary["stragglers"]
    worst = max(found["found"], key=lambda each: each["lost_seconds"])  # a busy machine makes others slow for a moment
    assert (worst["rank"], worst["cause"]) == (1, "compute")
    assert worst["slower"] > 2
    # 0.07 s in every step but the first three.
    assert found["lost_seconds"] == pytest.approx(0.07 * (steps - 3), rel=0.5)
    assert "slow compute" in (run.path / "report.html").read_text()
