"""What a killed command, and what a user's task has started, do not leave behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from conftest import MLP, MakeJob, wait_for
from processes import MARKED, alive, children, gone, parent, pids, start_command, write_job
from verbund import checkpoint
from verbund.comm.rendezvous import Listener, Meeting
from verbund.stage import launch


@pytest.mark.parametrize("after", [0.0, 0.1, 0.5])
def test_killed_while_the_warm_server_starts(after: float, make_job: MakeJob, tmp_path: Path, temporary: Path) -> None:
    write_job(make_job, tmp_path, {})
    command = start_command(tmp_path, temporary=temporary)
    (server,) = wait_for(lambda: children(command.pid), "the warm server")
    time.sleep(after)
    command.kill()
    _, errors = command.communicate(timeout=20)  # ends only when nobody has standard error open any more
    assert errors in ("", "reading data.npz\n")
    assert gone([server], 10)
    assert not list(temporary.iterdir())


def test_the_folder_of_a_killed_command_is_removed_by_the_next(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    living = Meeting.create()
    listener = Listener(living)
    killed = Meeting.create()
    Listener(killed).close()
    (foreign := temporary / "verbund-of-somebody").mkdir()
    new = Meeting.create()
    assert set(temporary.iterdir()) == {living.folder, foreign, new.folder}
    listener.close()


def test_a_long_name_of_the_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (long := tmp_path / ("long" * 40)).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    meeting = Meeting.create()
    Listener(meeting).close()
    meeting.remove()


STARTS_OTHERS = (
    MARKED
    + """
import multiprocessing, subprocess

def work():
    time.sleep(1000)

for session in (False, True):
    started = subprocess.Popen(["sleep", "1000"], start_new_session=session)
    (HERE / f"other-{started.pid}").touch()
started = multiprocessing.get_context("fork").Process(target=work)
started.start()
(HERE / f"other-{started.pid}").touch()
"""
)


def others(folder: Path) -> list[int]:
    return [int(path.name[6:]) for path in folder.glob("other-*")]


def test_what_the_task_starts_ends_with_the_command(make_job: MakeJob, tmp_path: Path) -> None:
    write_job(make_job, tmp_path, {"train.steps": 3, "strategy.mesh": {"data": 2}}, STARTS_OTHERS)
    command = start_command(tmp_path)
    _, errors = command.communicate(timeout=30)
    assert command.returncode == 0, errors
    assert len(others(tmp_path)) == 9
    assert not any(map(alive, others(tmp_path)))


def test_what_the_task_starts_ends_with_a_killed_command(make_job: MakeJob, tmp_path: Path) -> None:
    changes = {"train.steps": 1_000_000, "strategy.mesh": {"data": 2}, "cluster.orphan_grace": 1.0}
    write_job(make_job, tmp_path, changes, STARTS_OTHERS)
    command = start_command(tmp_path)
    pids(tmp_path, 2)
    command.kill()
    command.communicate(timeout=20)
    assert gone(others(tmp_path), 10)


def test_what_the_task_starts_ends_with_a_killed_warm_server(make_job: MakeJob, tmp_path: Path) -> None:
    task = STARTS_OTHERS.replace("(False, True)", "(False,)")  # who leaves its group is found by its parent alone
    write_job(make_job, tmp_path, {"train.steps": 1_000_000, "strategy.mesh": {"data": 2}}, task)
    command = start_command(tmp_path)
    os.kill(parent(pids(tmp_path, 2)[0]), signal.SIGKILL)
    command.communicate(timeout=20)
    assert command.returncode == 3
    assert gone(others(tmp_path), 10)


WIDE = MLP.replace("16", "60_000")  # its checkpoint takes a while to write


def test_killed_while_saving(make_job: MakeJob, tmp_path: Path, shared_cluster: object) -> None:
    changes = {"train.steps": 1_000_000, "checkpoint.every": 1, "cluster.orphan_grace": 0.5}
    write_job(make_job, tmp_path, changes, WIDE)
    command = start_command(tmp_path)
    checkpoints = tmp_path / "run" / "checkpoints"
    wait_for(lambda: list(checkpoints.glob("step-*")), "a checkpoint")
    wait_for(lambda: list(checkpoints.glob(".step-*.partial/*")), "a save")
    command.kill()
    command.communicate(timeout=20)
    saved = checkpoint.newest_valid(checkpoints)[0]
    half = checkpoints / f".step-{int(saved.name[5:13]) + 1:08d}.partial"
    half.mkdir(exist_ok=True)  # a kill between two saves leaves none
    (half / "part-00000-0.safetensors").write_bytes(b"half")
    steps = int(saved.name[5:13]) + 3
    run = launch.resume(tmp_path / "run", {"train.steps": steps})
    assert run.summary["status"] == "done"
    assert run.summary["steps"] == steps
    assert not list(checkpoints.glob(".step-*"))


def test_what_was_compiled_is_no_temporary_file(
    make_job: MakeJob, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # torch sets it where a test has compiled
    task = MARKED + "from torch._inductor.runtime.cache_dir_utils import cache_dir\ncache_dir()\n"
    write_job(make_job, tmp_path, {"train.steps": 2}, task)
    command = start_command(tmp_path, temporary=temporary)
    _, errors = command.communicate(timeout=60)
    assert command.returncode == 0, errors
    assert not list(temporary.iterdir())
    assert (tmp_path / "cache" / "compiled").is_dir()
