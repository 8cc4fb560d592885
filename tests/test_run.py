"""A run's directory."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from verbund.errors import InputError, JobError, RunFailed
from verbund.job import Job
from verbund.run import Run

TASK = "def model():\n    raise NotImplementedError\n"


def build(folder: Path, **more: Any) -> Job:
    folder.mkdir(exist_ok=True)
    (folder / "task.py").write_text(TASK)
    raw: dict[str, Any] = {
        "task": "task.py",
        "name": "digits",
        "data": {"train": "x.npz", "input": "x", "target": "y", "image_size": [8, 8], "scale": {"x": 2.0}},
        "train": {
            "objective": "cross_entropy",
            "steps": 5,
            "optimizer": {"name": "adamw", "lr": 0.1, "betas": [0.9, 0.99], "groups": [{"match": "*.bias"}]},
        },
    }
    return Job.build({**raw, **more}, {}, source="job.toml", folder=folder)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return build(tmp_path / "job")


def test_created_and_opened_again(tmp_path: Path, job: Job) -> None:
    run = Run.create(tmp_path / "deep" / "run", job)
    again = Run.open(tmp_path / "deep" / "run")
    assert again.path == run.path == tmp_path / "deep" / "run"
    assert again.job == job
    assert again.job.path("x.npz") == tmp_path / "job" / "x.npz"
    assert again.journal.is_dir()
    assert again.checkpoints.is_dir()
    assert (again.summary, again.attempt, again.changed_files()) == ({}, 0, [])
    assert (run.path / "task" / "task.py").read_text() == TASK


def test_a_name_of_its_own_and_the_link_to_the_newest(
    tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda form, *_: "20260102-030405")
    runs = [Run.create(None, job) for _ in range(3)]
    names = [f"digits-20260102-030405{number}" for number in ("", "-2", "-3")]
    assert [run.path for run in runs] == [tmp_path / "runs" / name for name in names]
    assert Path("runs/latest").readlink() == Path(names[2])
    assert Run.open(Path("runs/latest")).path == runs[2].path
    assert Run.create(tmp_path / "own", job).path == tmp_path / "own"
    assert Path("runs/latest").readlink() == Path(names[2])  # a directory of its own moves no link
    Path("runs/latest").unlink()
    Path("runs/latest").write_text("somebody's file")
    Run.create(None, job)
    assert Path("runs/latest").read_text() == "somebody's file"


@pytest.mark.parametrize(("name", "start"), [("../a/b", "a-b-"), ("..", "run-"), ("x" * 300, "x" * 80 + "-")])
def test_a_name_stays_below_the_parent(tmp_path: Path, name: str, start: str) -> None:
    run = Run.create(None, build(tmp_path / "job", name=name), parent=tmp_path / "runs")
    assert run.path.parent == tmp_path / "runs"
    assert run.path.name.startswith(start)


def test_a_directory_in_use_is_refused_and_untouched(tmp_path: Path, job: Job) -> None:
    used = tmp_path / "used"
    used.mkdir()
    (used / "thesis.txt").write_text("years of work")
    with pytest.raises(InputError, match="not empty") as caught:
        Run.create(used, job)
    assert caught.value.exit_status == 2
    assert [path.name for path in used.iterdir()] == ["thesis.txt"]
    with pytest.raises(InputError, match="is a file"):
        Run.create(used / "thesis.txt", job)
    with pytest.raises(InputError, match="cannot be written"):
        Run.create(used / "thesis.txt" / "run", job)
    (tmp_path / "empty").mkdir()
    assert Run.create(tmp_path / "empty", job).job == job


def test_what_is_no_run_is_refused(tmp_path: Path, job: Job) -> None:
    with pytest.raises(InputError, match="no such run"):
        Run.open(tmp_path / "nowhere")
    with pytest.raises(InputError, match="is a file"):
        Run.open(tmp_path / "job" / "task.py")
    with pytest.raises(InputError, match="not a run's directory"):
        Run.open(tmp_path / "job")


@pytest.mark.parametrize(
    ("file", "content", "text"),
    [
        ("job.toml", b"task = ", "job.toml"),
        ("job.toml", b"\xff\xfe", "job.toml"),
        ("job.toml", b"colour = 3\n", "job.toml"),
        ("origin.json", b"{", "origin.json"),
        ("origin.json", b"[]", "origin.json"),
        ("origin.json", b"{}", "origin.json"),
        ("origin.json", b'{"folder": "relative"}', "origin.json"),
        ("origin.json", b"[" * 100_000, "origin.json"),
    ],
)
def test_damage_is_named(tmp_path: Path, job: Job, file: str, content: bytes, text: str) -> None:
    run = Run.create(tmp_path / "run", job)
    (run.path / file).write_bytes(content)
    with pytest.raises(InputError) as caught:
        _ = Run.open(run.path).job
    assert text in str(caught.value)


def test_all_problems_of_a_damaged_job_are_told(tmp_path: Path, job: Job) -> None:
    run = Run.create(tmp_path / "run", job)
    (run.path / "job.toml").write_text('task = "t.py"\ncolour = 1\n[train]\nstep = 3\n')
    with pytest.raises(JobError) as caught:
        _ = Run.open(run.path).job
    assert len(caught.value.problems) >= 2


def test_a_changed_task_is_noticed(tmp_path: Path, job: Job) -> None:
    run = Run.create(tmp_path / "run", job)
    task = tmp_path / "job" / "task.py"
    task.write_text(TASK + "# more\n")
    (warning,) = Run.open(run.path).changed_files()
    assert "has changed" in warning
    assert str(run.path / "task" / "task.py") in warning
    task.unlink()
    (warning,) = Run.open(run.path).changed_files()
    assert "is gone" in warning


def test_the_job_is_rewritten(tmp_path: Path, job: Job) -> None:
    run = Run.create(tmp_path / "run", job)
    other = Job.build(job.resolved(), {"strategy.mesh": {"data": 3}}, source="x", folder=Path(job.folder))
    assert run.job.world == 1
    run.rewrite_job(other)
    assert run.job.world == Run.open(run.path).job.world == 3
    assert run.job == Run.open(run.path).job == other


def test_attempts_count_and_clear_up(tmp_path: Path, job: Job) -> None:
    run = Run.create(tmp_path / "run", job)
    assert [run.begin_attempt() for _ in range(3)] == [1, 2, 3]
    (run.checkpoints / ".step-00000009.partial").mkdir()
    assert Run.open(run.path).attempt == 3
    run.begin_attempt()
    assert not list(run.checkpoints.iterdir())
    for damage in ('{"attempts": -1}', '{"attempts": "4"}', "{}", "4"):
        (run.path / "attempts.json").write_text(damage)
        with pytest.raises(InputError, match=r"attempts\.json"):
            run.begin_attempt()


def test_summary(tmp_path: Path, job: Job) -> None:
    run = Run.create(tmp_path / "run", job)
    summary = {
        "status": "done",
        "steps": 10,
        "samples": 1280,
        "loss": {"last": 0.25},
        "seconds": {"total": 3.21},
        "metrics": {"accuracy": {"last": 0.96875, "best": 0.98}, "confusion": {"last": [[1]]}},
    }
    assert Run.open(run.path).headline()[0] == "no summary was written"
    run.write_summary(summary)
    assert Run.open(run.path).summary == summary
    run.report.write_text("<html>")
    assert run.headline() == [
        "done: 10 steps, 1280 samples, training loss 0.25, 3.2 s",
        "validation accuracy: 0.96875 (best 0.98)",
        f"run: {run.path}",
        f"report: {run.report}",
    ]
    run.write_summary({"status": "done", "steps": 4, "samples": 0})  # federated: nobody tells how many they were
    assert run.headline()[0] == "done: 4 steps"
    (run.path / "summary.json").write_text('{"status": ')
    with pytest.raises(InputError, match=r"summary\.json"):
        _ = run.summary


def test_a_full_disk_keeps_the_former_summary(tmp_path: Path, job: Job) -> None:
    run = Run.create(tmp_path / "run", job)
    run.write_summary({"status": "done"})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(RunFailed, match="the disk is full"):
            run.write_summary({"status": "x" * 1000})
        with pytest.raises(RunFailed, match="the disk is full"):
            Run.create(tmp_path / "other", job)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert run.summary == {"status": "done"}
    assert not (run.path / ".summary.json.new").exists()
    assert not (tmp_path / "other").exists()


HOLD = """
import os, sys, time
from pathlib import Path
from verbund.run import Run
with Run(Path(sys.argv[1])).lock():
    if sys.argv[2] == "alone" or os.fork() == 0:
        print(os.getpid(), flush=True)
    time.sleep(60)
"""


def hold(run: Run, how: str) -> tuple[subprocess.Popen[str], int]:
    """A process that holds the run's lock; and its number, or that of the child it forked inside."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(run.path), how], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def acquired(run: Run, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            with run.lock():
                return True
        except InputError:
            time.sleep(0.02)
    return False


def test_one_trains_at_a_time(tmp_path: Path, job: Job) -> None:
    run = Run.create(tmp_path / "run", job)
    process, pid = hold(run, "alone")
    with pytest.raises(InputError, match=f"process {pid} is training this run") as caught, run.lock():
        pytest.fail("both have the lock")
    assert caught.value.exit_status == 2
    process.kill()
    process.communicate()
    assert acquired(run, 5.0)
    with run.lock(), pytest.raises(InputError, match=str(os.getpid())), Run.open(run.path).lock():
        pytest.fail("both have the lock")
    assert acquired(run, 0.5)


def test_a_killed_one_leaves_the_lock_to_its_children(tmp_path: Path, job: Job) -> None:
    run = Run.create(tmp_path / "run", job)
    process, child = hold(run, "fork")
    process.kill()
    process.wait()
    try:
        with pytest.raises(InputError, match="is gone; its workers are still ending"), run.lock():
            pytest.fail("both have the lock")
    finally:
        os.kill(child, 9)
        process.communicate()
    assert acquired(run, 5.0)


def test_a_child_that_lives_on_does_not_keep_a_lock_that_was_given_back(tmp_path: Path, job: Job) -> None:
    run = Run.create(tmp_path / "run", job)
    with run.lock():
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
    try:
        assert acquired(run, 0.5)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_origin_is_plain(tmp_path: Path, job: Job) -> None:
    run = Run.create(tmp_path / "run", job)
    origin = json.loads((run.path / "origin.json").read_text())
    assert origin["folder"] == str(tmp_path / "job")
    assert origin["task"]["path"] == str(tmp_path / "job" / "task.py")
    assert len(origin["task"]["sha256"]) == 64
