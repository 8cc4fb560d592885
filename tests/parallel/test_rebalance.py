"""Shares of a global batch by speed, with a worker that is really slower: the numbers stay those of one process."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import MakeJob, losses, wait_for
from processes import start_command, write_job
from slow_task import shares, task_of
from verbund.observe.journal import read
from verbund.run import Run

RunJob = Callable[..., Run]

MLP = """
from torch import nn

def model():
    return nn.Sequential(
        nn.Linear(12, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 5)
    )
"""
BATCH_NORM = """
from torch import nn

def model():
    return nn.Sequential(nn.Linear(12, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 5))
"""
AUGMENT = """
def augment(batch, random):
    return {**batch, "x": batch["x"] + 0.1 * random.normal(12)}
"""
STEPS, BATCH = 40, 97
SETTINGS: dict[str, Any] = {
    "train.steps": STEPS,
    "train.global_batch": BATCH,
    "train.optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9},
}
EVERY = {"name": "rebalance", "every": 5}


def trained(run_job: RunJob, task: str, changes: dict[str, Any], slow: int = 3) -> Run:
    return run_job(task_of(task, slow), {**SETTINGS, **changes}, rows=330)


CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "data": (MLP, {"strategy.mesh": {"data": 4}}, 3),
    "micro-batches": (MLP, {"strategy.mesh": {"data": 3}, "train.micro_batch": 9}, 2),
    "groups": (BATCH_NORM, {"strategy.mesh": {"data": 3}, "train.group": 5}, 2),
    "shard": (MLP, {"strategy.mesh": {"data": 2, "shard": 2}, "train.micro_batch": 12}, 3),
    "pipeline": (MLP, {"strategy.mesh": {"data": 2, "pipeline": 2}}, 1),
    "tensor": (MLP, {"strategy.mesh": {"data": 2, "tensor": 2}}, 3),
    "islands": (MLP, {"strategy.islands": 2, "strategy.mesh": {"data": 2}}, 3),
    "reads ahead": (MLP + AUGMENT, {"strategy.mesh": {"data": 3}}, 2),
    "loaders": (MLP + AUGMENT, {"strategy.mesh": {"data": 2}, "data.loaders": 1}, 1),
}
"""Task, changes, and the slow worker, which has the last samples."""
references: dict[str, list[float]] = {}


@pytest.mark.parametrize("case", CASES)
def test_the_numbers_of_one_process(case: str, run_job: RunJob) -> None:
    task, changes, slow = CASES[case]
    if task not in references:
        alone = {key: value for key, value in changes.items() if key == "train.group"}
        references[task] = losses(trained(run_job, task, alone, slow=-1))
    run = trained(run_job, task, {**changes, "strategy.stragglers": EVERY}, slow)
    np.testing.assert_allclose(losses(run), references[task], rtol=2e-5)
    decided = shares(run.path)
    assert decided, "no share was ever changed"
    assert all(sum(each) == BATCH and min(each) > 0 for each in decided)
    assert decided[-1][-1] < BATCH / len(decided[-1])  # by how much depends on what else the machine does


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param({"strategy.mesh": {"data": 3}}, id="data"),
        pytest.param({"strategy.islands": 2, "strategy.mesh": {"shard": 2}}, id="islands of shards"),
    ],
)
def test_a_lost_worker_is_replaced(
    strategy: dict[str, Any], make_job: MakeJob, run_job: RunJob, tmp_path: Path
) -> None:
    """Who takes its place knows no speeds: all begin with even shares again."""
    changes = {**SETTINGS, **strategy, "train.steps": 60, "strategy.stragglers": EVERY}
    write_job(make_job, tmp_path, {**changes, "cluster.replacements": 5, "cluster.heartbeat": 0.2}, task_of(MLP, 2))
    command = start_command(tmp_path)
    folder = tmp_path / "run"
    wait_for(lambda: shares(folder), "new shares", 60)
    lost = next(journal.pid for journal in read(folder / "journal") if journal.role == "worker" and journal.rank == 1)
    os.kill(lost, signal.SIGKILL)
    _, errors = command.communicate(timeout=100)
    assert command.returncode == 0, errors
    assert errors.count("another process takes its place") == 1
    alone = run_job(task_of(MLP, -1), {**SETTINGS, "train.steps": 60})
    np.testing.assert_allclose(losses(Run.open(folder)), losses(alone), rtol=2e-5)
    assert len(shares(folder)) > 1
