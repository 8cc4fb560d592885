"""Machines that share no folder with the command: task and data come to them, saves and journals go to its owner."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.joiners import ended, start, train, write
from conftest import MLP, MakeJob, losses, wait_for
from processes import MARKED, alive
from trained import close
from verbund.observe.journal import read
from verbund.run import Run

TASK = "from layers import WIDTH\n" + MARKED.replace("16", "WIDTH")
CHANGES = {"strategy.mesh": {"data": 2}, "cluster.heartbeat": 0.2, "cluster.replacements": 3}


def join(command_folder: Path, own: Path, *more: str) -> subprocess.Popen[str]:
    """From a folder of its own, with a home and a cache of its own."""
    own.mkdir(exist_ok=True)
    secret = command_folder / "here.secret"
    wait_for(secret.exists, "the secret", 30)
    wait_for((command_folder / "here").exists, "the address", 30)
    environment = {"HOME": str(own), "XDG_CACHE_HOME": str(own / "cache"), "TMPDIR": "/tmp", "SLOW": "0.03"}
    address = (command_folder / "here").read_text().strip()
    words = ["join", address, "--secret-file", str(secret), "--folder", str(own / "kept"), *more]
    return start(own, *words, **environment)


def computing(own: Path) -> list[int]:
    """The workers that run the task as this machine has it."""
    found = [int(path.name[4:]) for path in own.glob("kept/code/*/pid-*")]
    return [pid for pid in found if alive(pid)]


def prepared(folder: Path) -> None:
    (folder / "layers.py").write_text("WIDTH = 16\n")


def test_trained_and_resumed_as_on_one_machine(
    run_job: Callable[..., Run], make_job: MakeJob, tmp_path: Path, temporary: Path
) -> None:
    """A worker is killed on the way, and the resume has another strategy on another machine."""
    prepared(tmp_path)
    changes = {"checkpoint.every": 20, "data.validation_fraction": 0.2}
    write(tmp_path, make_job, {**changes, **CHANGES, "train.steps": 10**6}, TASK)
    command = train(tmp_path)
    owns = [temporary / f"host-{number}" for number in range(3)]
    joiners = [join(tmp_path, own) for own in owns[:2]]
    wait_for(lambda: any((tmp_path / "run" / "checkpoints").glob("step-*")), "a checkpoint", 60)
    (victim,) = computing(owns[1])
    os.kill(victim, signal.SIGKILL)
    journal = tmp_path / "run" / "journal"
    wait_for(lambda: len([*journal.glob("worker-*")]) == 3, "the journal of another worker", 30)
    wait_for(lambda: [pid for pid in computing(owns[1]) if pid != victim], "another worker", 30)
    command.send_signal(signal.SIGINT)
    said = ended(command, 130)
    assert "another process takes its place" in said
    for joiner in joiners:
        ended(joiner, 0)
    assert not [*tmp_path.glob("pid-*")]  # nobody has run the task where the command has it
    run = Run.open(tmp_path / "run")
    steps = run.summary["steps"]
    assert steps > 20
    killed = [one.path.name for one in read(journal) if not one.ended]
    assert len(killed) == 1, killed  # of all others not a line is missing

    last = ["--set", f"train.steps={steps + 20}", "--strategy", "tensor=2", "--json"]
    command = start(tmp_path, "resume", "run", *last)
    joiner = join(tmp_path, owns[2], "--slots", "2")
    out, errors = command.communicate(timeout=90)
    assert command.returncode == 0, errors
    ended(joiner, 0)
    assert json.loads(out)["steps"] == steps + 20
    whole = run_job(MLP, {**changes, "train.steps": steps + 20, "checkpoint.every": "end"})
    run = Run.open(tmp_path / "run")
    assert losses(run) == pytest.approx(losses(whole), rel=2e-4)
    close(run, whole, 2e-4)
    assert all(one.ended for one in read(run.journal) if one.generation == 2)
    for own in owns:
        left = {path.name for path in (own / "kept").iterdir()}
        assert left == {"code", "data"}


def test_an_error_of_the_task_names_the_users_own_file(make_job: MakeJob, tmp_path: Path, temporary: Path) -> None:
    wrong = TASK.replace('return batch["x"]', 'return batch["x"] if batch["x"].shape[0] < 3 else 1 / 0')
    prepared(tmp_path)
    write(tmp_path, make_job, {**CHANGES, "strategy.mesh": {"data": 1}}, wrong)
    command = train(tmp_path)
    joiner = join(tmp_path, temporary)
    out, errors = command.communicate(timeout=60)
    assert command.returncode in (1, 2), (out, errors)
    assert "ZeroDivisionError" in errors
    assert str(tmp_path / "task.py") in errors
    assert "kept" not in errors
    ended(joiner, 0)
