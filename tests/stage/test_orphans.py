"""Workers whose command is killed save the step that they have come to, and a resume goes on from there."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from conftest import MakeJob, losses, wait_for
from processes import MARKED, gone, passes, pids, start_command, write_job
from verbund.cluster.local import LocalCluster
from verbund.errors import ClusterLost
from verbund.observe.journal import read
from verbund.run import Run, attend
from verbund.stage import launch

STEPS = 25
CHANGES: dict[str, Any] = {
    "train.steps": STEPS,
    "train.optimizer": {"name": "adamw", "lr": 1e-3},
    "checkpoint.every": "end",
    "cluster.threads": 1,
    "cluster.orphan_grace": 20.0,
}


@pytest.mark.parametrize(
    "strategy",
    [{"mesh": {"data": 2}}, {"mesh": {"pipeline": 2}}, {"mesh": {"shard": 2}, "islands": 2}],
    ids=["data", "pipeline", "islands"],
)
def test_no_step_is_lost(
    strategy: dict[str, Any], make_job: MakeJob, shared_cluster: LocalCluster, tmp_path: Path
) -> None:
    """Resumed at once, while the workers still have their last step to do."""
    write_job(make_job, tmp_path, {**CHANGES, "strategy": strategy})
    workers = strategy.get("islands", 1) * 2
    command = start_command(tmp_path)
    running = pids(tmp_path, workers, 60)
    wait_for(lambda: passes(tmp_path, workers) > 4, "some steps", 60)
    command.kill()
    command.wait()
    run = launch.resume(tmp_path / "run")
    assert gone(running, 1)
    command.communicate()
    assert run.summary["status"] == "done"
    assert [step for step, _ in run.summary["loss"]["curve"]] == list(range(STEPS))
    former, later = (
        [int(step) for j in read(run.journal) if j.generation == n and j.rank == 0 for step in j.steps[:, 0]]
        for n in (1, 2)
    )
    assert former == list(range(later[0]))  # no step is done twice
    assert former
    undisturbed = launch.train(run.job, tmp_path / "undisturbed")
    assert losses(run) == pytest.approx(losses(undisturbed), rel=1e-6)
    assert run.summary["samples"] == undisturbed.summary["samples"]


def test_a_resume_waits_for_all_workers(make_job: MakeJob, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", make_job())
    run.wait_for_workers(0.0, pytest.fail)  # nobody has trained it yet
    child = os.fork()
    if not child:
        attend(run.path)
        time.sleep(0.5)
        os._exit(0)
    wait_for((run.path / "workers").exists, "the worker", 10)
    told: list[str] = []
    time.sleep(0.1)
    with pytest.raises(ClusterLost, match=r"have not ended within 0 s"):
        run.wait_for_workers(0.1, told.append)
    run.wait_for_workers(10.0, told.append)
    assert len(told) == 2
    os.waitpid(child, 0)
    run.wait_for_workers(0.0, pytest.fail)


def test_a_full_disk_leaves_the_former_checkpoint(make_job: MakeJob, tmp_path: Path) -> None:
    """What cannot be saved is told in the journal, and nothing of it is left."""
    task = MARKED.replace('"SLOW", 0.01', '"SLOW", 0.03') + (
        """
from verbund.checkpoint import store

def refuse(*_):
    raise OSError(28, "No space left on device")

store.durable.write_new = refuse
"""
    )
    write_job(make_job, tmp_path, {**CHANGES, "strategy.mesh": {"data": 2}}, task)
    command = start_command(tmp_path)
    running = pids(tmp_path, 2)
    wait_for(lambda: passes(tmp_path, 2) > 5, "some steps", 60)
    command.kill()
    command.communicate()
    assert gone(running, 10)
    run = Run.open(tmp_path / "run")
    assert not list(run.checkpoints.iterdir())
    (failed,) = [e for j in read(run.journal) for e in j.events if e["name"] == "checkpoint_failed"]
    assert "the disk is full" in failed["failure"]
