"""Where steps are not those of one process: they learn as much, and what became of every share is counted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from verbund.run import Run

RunJob = Callable[..., Run]

# Convex, and with labels that nobody can tell: all that learn it end near the same accuracy, which is not 1.
TASK = """
from torch import nn

def model():
    return nn.Linear(12, 5)
"""


def noisy_clusters() -> dict[str, Any]:
    random = np.random.default_rng(3)
    y = random.integers(0, 5, 2400)
    x = random.normal(size=(5, 12))[y] + random.normal(size=(2400, 12))
    return {"x": x.astype(np.float32), "y": y}


CHANGES = {
    "train.epochs": 6,
    "train.optimizer": {"name": "sgd", "lr": 0.2},
    "train.schedule": {"name": "cosine"},
    "data.validation_fraction": 0.4,
    "validate.metrics": ["accuracy"],
}


def served(run_job: RunJob, batch: int, **exchange: Any) -> Run:
    changes = {**CHANGES, "train.steps": None, "train.global_batch": batch, "strategy.islands": 3}
    exchange = {"name": "parameter_server", "log": False, **exchange}
    return run_job(TASK, {**changes, "strategy.exchange": exchange}, **noisy_clusters())


@pytest.fixture
def synchronous(run_job: RunJob) -> float:
    """The accuracy that synchronous islands reach."""
    found = accuracy(served(run_job, 48))
    assert 0.8 < found < 0.98
    return found


def accuracy(run: Run) -> float:
    return float(run.summary["metrics"]["accuracy"]["last"])


def test_they_learn_as_much(synchronous: float, run_job: RunJob) -> None:
    for batch, exchange in [
        (48, {"consistency": "bounded_staleness", "staleness": 3}),
        (16, {"consistency": "asynchronous"}),
        (16, {"consistency": "asynchronous", "staleness_aware": True}),
        (16, {"consistency": "asynchronous", "delay_compensation": 0.04}),
    ]:
        run = served(run_job, batch, **exchange)
        assert accuracy(run) >= synchronous - 0.01, exchange
        found = run.summary["servers"]
        histogram = dict(found["staleness"]["histogram"])
        divided = exchange["consistency"] == "bounded_staleness"
        assert sum(histogram.values()) == found["updates"] == run.summary["steps"] * (3 if divided else 1)
        assert found["staleness"]["max"] == max(histogram)
        assert not divided or max(histogram) <= 3
        assert found["late"] == found["skipped"] == found["repeated"] == 0


def test_an_island_leaves_out_what_it_has_missed(run_job: RunJob, tmp_path: Path) -> None:
    """With `backup` a slow island does not do in vain, one by one, all steps that were taken without it."""
    slow = f"""
import time
from pathlib import Path

calls, sleeps = 0, False

def inputs(batch):
    global calls, sleeps
    calls += 1
    if calls == 5:  # not where the model is only tried
        try:
            Path("{tmp_path / "slow"}").touch(exist_ok=False)
            sleeps = True
        except FileExistsError:
            pass
    if sleeps:
        time.sleep(0.1)
    else:
        time.sleep(0.01)
    return batch["x"]
"""
    exchange = {"name": "parameter_server", "log": False, "backup": 1}
    run = run_job(TASK + slow, {"train.steps": 60, "strategy.islands": 2, "strategy.exchange": exchange})
    found = run.summary["servers"]
    assert found["skipped"] > 10
    assert found["updates"] + found["late"] + found["skipped"] == 120
