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

from conftest import Struck, losses, wait_for
from processes import MARKED, alive, gone, passes, pids
from verbund.errors import Interrupted
from verbund.run import Run
from verbund.stage import launch

STEPS = 90
SETTINGS: dict[str, Any] = {
    "cluster.replacements": 20,
    "cluster.heartbeat": 0.2,
    "cluster.threads": 1,
    "strategy.mesh": {"data": 3},
    "train.steps": STEPS,
    "train.optimizer": {"name": "adamw", "lr": 1e-3},
    "train.ema": 0.9,
    "validate.every": 25,
    "data.validation_fraction": 0.2,
}


def _check(run: Run, told: str, deaths: int) -> None:
    folder = run.path.parent
    summary = run.summary
    assert (summary["status"], summary["steps"], summary["attempt"]) == ("done", STEPS, 1), told
    assert told.count("another process takes its place") == deaths
    (folder / "task.py").write_text(MARKED.replace("SLOW)", "0)"))
    undisturbed = launch.train(run.job, folder / "undisturbed")
    assert losses(run) == pytest.approx(losses(undisturbed), rel=1e-5)
    for name in ("loss", "accuracy"):
        assert summary["metrics"][name]["curve"] == [
            [step, pytest.approx(value, rel=1e-5)] for step, value in undisturbed.summary["metrics"][name]["curve"]
        ]
    assert summary["samples"] == undisturbed.summary["samples"]


def _begun(folder: Path) -> list[int]:
    """The pids of the workers, once all have done some steps."""
    wait_for(lambda: passes(folder, 3) > 10, "some steps", 60)
    return pids(folder, 3)


@pytest.mark.parametrize("rank", [0, 2])
def test_one_is_killed(rank: int, struck: Struck, tmp_path: Path) -> None:
    _check(*struck(MARKED, SETTINGS, lambda: os.kill(_begun(tmp_path)[rank], signal.SIGKILL)), deaths=1)


def test_two_at_once_and_one_that_has_just_come(struck: Struck, tmp_path: Path) -> None:
    def strike() -> None:
        workers = _begun(tmp_path)
        for pid in workers[1:]:
            os.kill(pid, signal.SIGKILL)
        new = wait_for(lambda: [pid for pid in pids(tmp_path, 3, 60) if pid not in workers], "new workers", 40)
        os.kill(new[0], signal.SIGKILL)

    _check(*struck(MARKED, SETTINGS, strike), deaths=3)


def test_ten_kills(struck: Struck, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Single ones, two at once, and while the others recover; what is left of former eras is given back."""
    choose = random.Random(1)
    descriptors: list[int] = []

    def strike() -> None:
        keeper, dead = pids(tmp_path, 4, 60)[0], list[int]()
        for kills in (1, 2, 1, 1, 2, 1, 1, 1):
            living = wait_for(lambda: _computing(tmp_path, 4, dead), "four workers", 60)
            descriptors.append(len(os.listdir(f"/proc/{keeper}/fd")))
            for victim in choose.sample([pid for pid in living if pid != keeper], kills):
                os.kill(victim, signal.SIGKILL)
                dead.append(victim)
                time.sleep(choose.choice([0.0, 0.05]))  # within the recovery of the others
        wait_for(lambda: _computing(tmp_path, 4, dead), "four workers", 60)
        os.kill(os.getpid(), signal.SIGINT)

    changes = {**SETTINGS, "strategy.mesh": {"data": 4}, "train.steps": 10**6, "validate.every": 50}
    with pytest.raises(Interrupted):
        struck(MARKED.replace("SLOW)", "0.003)"), changes, strike)
    assert capfd.readouterr().err.count("another process takes its place") == 10
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
def test_at_the_end(after: float, struck: Struck, tmp_path: Path) -> None:
    """Killed while the others save or leave: the run ends, with all that there is."""

    def strike() -> None:
        workers = pids(tmp_path, 3, 60)
        saves = tmp_path / "run" / "checkpoints"
        wait_for(lambda: [*saves.glob(".step-00000030*"), *saves.glob("step-00000030")], "the last save", 60)
        time.sleep(after)
        with contextlib.suppress(ProcessLookupError):
            os.kill(workers[1], signal.SIGKILL)

    run, _ = struck(MARKED, {**SETTINGS, "train.steps": 30, "validate.every": "end"}, strike)
    assert (run.summary["status"], run.summary["steps"]) == ("done", 30)


def test_one_is_stopped(struck: Struck, tmp_path: Path) -> None:
    """The kernel says that it is, so nobody waits for it as long as for one that may be busy (30 s)."""
    stopped: list[int] = []

    def strike() -> None:
        stopped.append(_begun(tmp_path)[1])
        os.kill(stopped[0], signal.SIGSTOP)

    run, told = struck(MARKED, SETTINGS, strike)
    assert gone(stopped, 10)
    assert run.summary["membership"]["seconds_lost"] < 15
    _check(run, told, deaths=1)


def test_all_are_lost(struck: Struck, tmp_path: Path) -> None:
    """Nobody has it in memory any more: the newest checkpoint has."""

    def strike() -> None:
        for pid in _begun(tmp_path):
            os.kill(pid, signal.SIGKILL)

    run, _ = struck(MARKED, {**SETTINGS, "checkpoint.every": 5}, strike)
    assert (run.summary["steps"], run.summary["attempt"]) == (STEPS, 2)
    (tmp_path / "task.py").write_text(MARKED.replace("SLOW)", "0)"))
    assert losses(run) == pytest.approx(losses(launch.train(run.job, tmp_path / "undisturbed")), rel=1e-5)
