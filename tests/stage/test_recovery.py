"""A lost worker is replaced while the others go on: no step is lost, and the result is that of an undisturbed run."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from conftest import MakeJob, losses, wait_for
from processes import alive, gone, pids, start_command, step_of, write_job
from verbund.run import Run
from verbund.stage import launch

SETTINGS: dict[str, Any] = {
    "cluster.replacements": 20,
    "cluster.heartbeat": 0.2,
    "cluster.threads": 1,
    "strategy.mesh": {"data": 3},
    "train.steps": 150,
    "train.optimizer": {"name": "adamw", "lr": 1e-3},
    "train.ema": 0.9,
    "validate.every": 40,
    "data.validation_fraction": 0.2,
}


def _check(folder: Path, command: Any, deaths: int) -> None:
    _, errors = command.communicate(timeout=100)
    assert command.returncode == 0, errors
    run = Run.open(folder / "run")
    summary = run.summary
    assert (summary["status"], summary["steps"], summary["attempt"]) == ("done", 150, 1), errors
    assert errors.count("another process takes its place") == deaths
    undisturbed = launch.train(run.job, folder / "undisturbed")
    assert losses(run) == pytest.approx(losses(undisturbed), rel=1e-5)
    for name in ("loss", "accuracy"):
        assert summary["metrics"][name]["curve"] == [
            [step, pytest.approx(value, rel=1e-5)] for step, value in undisturbed.summary["metrics"][name]["curve"]
        ]
    assert summary["samples"] == undisturbed.summary["samples"]


@pytest.mark.parametrize("rank", [0, 2])
def test_one_is_killed(rank: int, make_job: MakeJob, tmp_path: Path) -> None:
    write_job(make_job, tmp_path, SETTINGS)
    command = start_command(tmp_path)
    workers = pids(tmp_path, 3, 60)
    wait_for(lambda: step_of(tmp_path) > 10, "some steps", 40)
    os.kill(workers[rank], signal.SIGKILL)
    _check(tmp_path, command, 1)


def test_two_at_once_and_one_that_has_just_come(make_job: MakeJob, tmp_path: Path) -> None:
    write_job(make_job, tmp_path, SETTINGS)
    command = start_command(tmp_path)
    workers = pids(tmp_path, 3, 60)
    wait_for(lambda: step_of(tmp_path) > 10, "some steps", 40)
    for pid in workers[1:]:
        os.kill(pid, signal.SIGKILL)
    new = wait_for(lambda: [pid for pid in pids(tmp_path, 3, 60) if pid not in workers], "new workers", 40)
    os.kill(new[0], signal.SIGKILL)
    _check(tmp_path, command, 3)


def test_ten_kills(make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared_cluster: Any) -> None:
    """Single ones, two at once, and while the others recover; what is left of former eras is given back."""
    choose = random.Random(1)
    monkeypatch.setenv("SLOW", "0.003")
    write_job(
        make_job, tmp_path, {**SETTINGS, "strategy.mesh": {"data": 4}, "train.steps": 10**6, "validate.every": 50}
    )
    command = start_command(tmp_path)
    keeper, descriptors = pids(tmp_path, 4, 60)[0], []
    dead: list[int] = []
    for kills in (1, 2, 1, 1, 2, 1, 1, 1):
        living = wait_for(lambda: _computing(tmp_path, 4, dead), "four workers", 60)
        descriptors.append(len(os.listdir(f"/proc/{keeper}/fd")))
        for victim in choose.sample([pid for pid in living if pid != keeper], kills):
            os.kill(victim, signal.SIGKILL)
            dead.append(victim)
            time.sleep(choose.choice([0.0, 0.05]))  # within the recovery of the others
    wait_for(lambda: _computing(tmp_path, 4, dead), "four workers", 60)
    command.send_signal(signal.SIGINT)
    _, errors = command.communicate(timeout=60)
    assert command.returncode == 130, errors
    assert errors.count("another process takes its place") == 10
    assert max(descriptors[2:]) - descriptors[1] < 5
    run = Run.open(tmp_path / "run")
    found = losses(run)
    assert [step for step, _ in run.summary["loss"]["curve"]] == list(range(run.summary["steps"]))
    assert run.summary["membership"]["steps_redone"] == 0
    job = type(run.job).build(run.job.resolved(), {"train.steps": len(found)}, source="", folder=tmp_path)
    assert found == pytest.approx(losses(launch.train(job, tmp_path / "undisturbed")), rel=1e-5)


def _computing(folder: Path, count: int, dead: list[int]) -> list[int]:
    """The pids, if so many workers have computed in the last moment and none of them is dead."""
    found = [path for path in folder.glob("pid-*") if int(path.name[4:]) not in dead and alive(int(path.name[4:]))]
    now = time.time()
    fresh = [int(path.name[4:]) for path in found if now - path.stat().st_mtime < 1.0]
    return sorted(fresh) if len(fresh) == len(found) == count else []


@pytest.mark.parametrize("after", [0.0, 0.02, 0.05, 0.1])
def test_at_the_end(after: float, make_job: MakeJob, tmp_path: Path) -> None:
    """Killed while the others save or leave: the run ends, with all that there is."""
    write_job(make_job, tmp_path, {**SETTINGS, "train.steps": 30, "validate.every": "end"})
    command = start_command(tmp_path)
    workers = pids(tmp_path, 3, 60)
    partial = tmp_path / "run" / "checkpoints"
    wait_for(lambda: list(partial.glob(".step-00000030*")) or list(partial.glob("step-00000030")), "the last save", 60)
    time.sleep(after)
    with contextlib.suppress(ProcessLookupError):
        os.kill(workers[1], signal.SIGKILL)
    _, errors = command.communicate(timeout=60)
    assert command.returncode == 0, errors
    summary = Run.open(tmp_path / "run").summary
    assert (summary["status"], summary["steps"]) == ("done", 30)


def test_one_is_stopped(make_job: MakeJob, tmp_path: Path) -> None:
    """The kernel says that it is, so nobody waits for it as long as for one that may be busy (30 s)."""
    write_job(make_job, tmp_path, SETTINGS)
    command = start_command(tmp_path)
    stopped = pids(tmp_path, 3, 60)[1]
    wait_for(lambda: step_of(tmp_path) > 10, "some steps", 40)
    os.kill(stopped, signal.SIGSTOP)
    _check(tmp_path, command, 1)
    assert gone([stopped], 1)
    assert Run.open(tmp_path / "run").summary["membership"]["seconds_lost"] < 15


def test_all_are_lost(make_job: MakeJob, tmp_path: Path) -> None:
    """Nobody has it in memory any more: the newest checkpoint has."""
    write_job(make_job, tmp_path, {**SETTINGS, "checkpoint.every": 5})
    command = start_command(tmp_path)
    workers = pids(tmp_path, 3, 60)
    wait_for(lambda: step_of(tmp_path) > 20, "some steps", 40)
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    _, errors = command.communicate(timeout=100)
    assert command.returncode == 0, errors
    run = Run.open(tmp_path / "run")
    assert (run.summary["steps"], run.summary["attempt"]) == (150, 2)
    assert losses(run) == pytest.approx(losses(launch.train(run.job, tmp_path / "undisturbed")), rel=1e-5)
