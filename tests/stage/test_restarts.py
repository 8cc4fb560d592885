"""A lost process: training begins again from the newest checkpoint, and comes to what it would have come to."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import MakeJob, Struck, losses, wait_for
from processes import MARKED, gone, parent, pids, start_command, write_job
from verbund.errors import ClusterLost, Interrupted
from verbund.run import Run
from verbund.stage import launch

STEPS = 90
SETTINGS: dict[str, Any] = {
    "cluster.replacements": 5,
    "cluster.heartbeat": 0.2,
    "strategy.mesh": {"shard": 2},
    "checkpoint.mirror": 0,  # with mirrors or replicas a lost worker is replaced instead
    "train.steps": STEPS,
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
def test_killed_twice(strategy: dict[str, Any], struck: Struck, tmp_path: Path) -> None:
    def strike() -> None:
        at = -1
        for number in range(2):
            at = wait_for(lambda beyond=at: _saved(tmp_path, beyond), "a checkpoint", 60)
            os.kill(pids(tmp_path, 2, 60)[number], signal.SIGKILL)
            at = wait_for(lambda beyond=at: _saved(tmp_path, beyond), "a later checkpoint", 60)

    # Islands with rows of their own: nobody could take those of one that is left out.
    placement = {"data.placement": "island"} if "islands" in strategy else {}
    task = MARKED.replace("SLOW)", "0.002)") if "pipeline" in str(strategy) else MARKED  # eight passes a step
    run, _ = struck(task, {**SETTINGS, "strategy": strategy, **placement}, strike)
    summary = run.summary
    assert (summary["status"], summary["steps"], summary["generations"]) == ("done", STEPS, 3)
    assert [failure["process"] for failure in summary["failures"]].count("supervisor") == 0
    assert sum("killed by SIGKILL" in failure["error"]["what"] for failure in summary["failures"]) == 2
    assert any("training goes on from step" in note for note in summary["notes"])
    (tmp_path / "task.py").write_text(MARKED.replace("SLOW)", "0)"))
    undisturbed = launch.train(run.job, tmp_path / "undisturbed")
    assert losses(run) == pytest.approx(losses(undisturbed), rel=1e-5)


def test_stopped_for_too_long(struck: Struck, tmp_path: Path) -> None:
    stopped: list[int] = []

    def strike() -> None:
        at = wait_for(lambda: _saved(tmp_path), "a checkpoint", 60)
        stopped.append(pids(tmp_path, 2, 60)[0])
        os.kill(stopped[0], signal.SIGSTOP)
        wait_for(lambda: _saved(tmp_path, at + 10), "a later checkpoint", 60)

    _, told = struck(MARKED, {**SETTINGS, "cluster.lost_after": 1.0}, strike)
    assert gone(stopped, 10)
    assert "no sign of life" in told


def test_what_fails_again_and_again_ends_with_its_cause(run_job: Callable[..., Run], tmp_path: Path) -> None:
    task = """
import os, signal
from torch import nn

def model():
    return nn.Linear(12, 5)

def inputs(batch):
    trains = os.path.exists(os.path.join(os.path.dirname(__file__), "run-1"))  # and is not only tried
    if trains and len(batch["x"]) in (18, 19):
        os.kill(os.getpid(), signal.SIGKILL)
    return batch["x"]
"""
    with pytest.raises(ClusterLost, match="was killed by SIGKILL"):
        run_job(task, SETTINGS)
    summary = Run.open(tmp_path / "run-1").summary
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


def test_an_interrupt_after_a_restart(struck: Struck, tmp_path: Path) -> None:
    def strike() -> None:
        at = wait_for(lambda: _saved(tmp_path), "a checkpoint", 60)
        os.kill(pids(tmp_path, 2, 60)[0], signal.SIGKILL)
        wait_for(lambda: _saved(tmp_path, at + 10), "a later checkpoint", 60)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        struck(MARKED, {**SETTINGS, "train.steps": 5000}, strike)
