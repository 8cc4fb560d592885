"""A lost process: training begins again from the newest checkpoint, and comes to what it would have come to."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from conftest import MakeJob, losses, wait_for
from processes import gone, parent, pids, start_command, write_job
from verbund.run import Run
from verbund.stage import launch

SETTINGS: dict[str, Any] = {
    "cluster.replacements": 5,
    "cluster.heartbeat": 0.2,
    "strategy.mesh": {"shard": 2},
    "checkpoint.mirror": 0,  # with mirrors or replicas a lost worker is replaced instead
    "train.steps": 120,
    "train.optimizer": {"name": "adamw", "lr": 1e-3},
    "checkpoint.every": 10,
}


def _saved(folder: Path, beyond: int = -1) -> int | None:
    steps = [int(path.name[5:]) for path in (folder / "run" / "checkpoints").glob("step-*")]
    return max(steps) if steps and max(steps) > beyond else None


@pytest.mark.parametrize(
    "strategy",
    [{"mesh": {"shard": 2}}, {"mesh": {"pipeline": 2}}, {"islands": 2, "exchange": {"name": "local_sgd", "every": 4}}],
)
def test_killed_twice(strategy: dict[str, Any], make_job: MakeJob, tmp_path: Path) -> None:
    # Islands with rows of their own: nobody could take those of one that is left out.
    placement = {"data.placement": "island"} if "islands" in strategy else {}
    write_job(make_job, tmp_path, {**SETTINGS, "strategy": strategy, **placement})
    command = start_command(tmp_path)
    at = -1
    for number in range(2):
        at = wait_for(lambda beyond=at: _saved(tmp_path, beyond), "a checkpoint", 60)
        os.kill(pids(tmp_path, 2, 60)[number], signal.SIGKILL)
        at = wait_for(lambda beyond=at: _saved(tmp_path, beyond), "a later checkpoint", 60)
    _, errors = command.communicate(timeout=120)
    assert command.returncode == 0, errors
    run = Run.open(tmp_path / "run")
    summary = run.summary
    assert (summary["status"], summary["steps"], summary["generations"]) == ("done", 120, 3)
    assert [failure["process"] for failure in summary["failures"]].count("supervisor") == 0
    assert sum("killed by SIGKILL" in failure["error"]["what"] for failure in summary["failures"]) == 2
    assert any("training goes on from step" in note for note in summary["notes"])
    undisturbed = launch.train(run.job, tmp_path / "undisturbed")
    assert losses(run) == pytest.approx(losses(undisturbed), rel=1e-5)


def test_stopped_for_too_long(make_job: MakeJob, tmp_path: Path) -> None:
    write_job(make_job, tmp_path, {**SETTINGS, "cluster.lost_after": 1.0})
    command = start_command(tmp_path)
    at = wait_for(lambda: _saved(tmp_path), "a checkpoint", 60)
    stopped = pids(tmp_path, 2, 60)[0]
    os.kill(stopped, signal.SIGSTOP)
    wait_for(lambda: _saved(tmp_path, at + 10), "a later checkpoint", 60)
    assert gone([stopped], 1)
    _, errors = command.communicate(timeout=120)
    assert command.returncode == 0, errors
    assert "no sign of life" in errors


def test_what_fails_again_and_again_ends_with_its_cause(make_job: MakeJob, tmp_path: Path) -> None:
    task = """
import os, signal
from torch import nn

def model():
    return nn.Linear(12, 5)

def inputs(batch):
    trains = os.path.exists(os.path.join(os.path.dirname(__file__), "run"))  # and is not only tried
    if trains and len(batch["x"]) in (18, 19):
        os.kill(os.getpid(), signal.SIGKILL)
    return batch["x"]
"""
    write_job(make_job, tmp_path, SETTINGS, task)
    command = start_command(tmp_path)
    _, errors = command.communicate(timeout=120)
    assert command.returncode == 3, errors
    assert "was killed by SIGKILL" in errors
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert summary["attempt"] == 3  # the third came to nothing either


def test_a_lost_warm_server_is_not_worked_around(make_job: MakeJob, tmp_path: Path) -> None:
    write_job(make_job, tmp_path, SETTINGS)
    command = start_command(tmp_path)
    wait_for(lambda: _saved(tmp_path), "a checkpoint", 60)
    os.kill(parent(pids(tmp_path, 2, 60)[0]), signal.SIGKILL)
    _, errors = command.communicate(timeout=120)
    assert command.returncode == 3, errors
    assert "the parent of all workers" in errors


def test_an_interrupt_after_a_restart(make_job: MakeJob, tmp_path: Path) -> None:
    write_job(make_job, tmp_path, {**SETTINGS, "train.steps": 5000})
    command = start_command(tmp_path)
    at = wait_for(lambda: _saved(tmp_path), "a checkpoint", 60)
    os.kill(pids(tmp_path, 2, 60)[0], signal.SIGKILL)
    wait_for(lambda: _saved(tmp_path, at + 10), "a later checkpoint", 60)
    command.send_signal(signal.SIGINT)
    _, errors = command.communicate(timeout=120)
    assert command.returncode == 130, errors
