"""Ctrl-C and SIGTERM at any moment: 130, one clear line, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from conftest import MakeJob, wait_for
from processes import MARKED, alive, children, pids, start_command, write_job
from verbund.interrupts import Interrupt, Interrupts
from verbund.run import Run


def ended(command: subprocess.Popen[str], temporary: Path, seconds: float = 20.0) -> str:
    """The one line that an interrupted command leaves on standard error, besides its progress."""
    _, errors = command.communicate(timeout=seconds)
    assert command.returncode == 130, errors
    assert "Traceback" not in errors
    lines = [line for line in errors.splitlines() if line.startswith("verbund:")]
    assert len(lines) == 1, errors
    wait_for(lambda: not list(temporary.iterdir()), "an empty folder for temporary files")
    return lines[0]


def test_while_starting(make_job: MakeJob, tmp_path: Path, temporary: Path) -> None:
    write_job(make_job, tmp_path, {"train.steps": 1_000_000})
    for number, after in ((2, 0.02), (15, 0.1), (2, 0.3), (15, 0.6), (2, 1.2)):
        command = start_command(tmp_path, temporary=temporary)
        wait_for(lambda pid=command.pid: handles(pid, signal.SIGTERM), "the command")
        time.sleep(after)
        command.send_signal(number)
        ended(command, temporary)
        assert not list(tmp_path.glob("cache/data/converting-*"))


def handles(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(status.partition("SigCgt:")[2].split()[0], 16) >> (number - 1) & 1)


def test_in_the_dry_run(make_job: MakeJob, tmp_path: Path, temporary: Path) -> None:
    task = MARKED + "(HERE / 'loaded').touch()\ntime.sleep(60)\n"
    write_job(make_job, tmp_path, {}, task)
    command = start_command(tmp_path, temporary=temporary)
    wait_for((tmp_path / "loaded").exists, "the dry run")
    command.send_signal(signal.SIGTERM)
    assert "while the job was checked" in ended(command, temporary)
    assert not (tmp_path / "run").exists()


def test_twice_in_the_dry_run(make_job: MakeJob, tmp_path: Path, temporary: Path) -> None:
    task = MARKED + "(HERE / 'loaded').touch()\ntime.sleep(60)\n"
    write_job(make_job, tmp_path, {}, task)
    command = start_command(tmp_path, temporary=temporary)
    wait_for((tmp_path / "loaded").exists, "the dry run")
    for _ in range(5):
        command.send_signal(signal.SIGTERM)
        time.sleep(0.02)
    assert "while the job was checked" in ended(command, temporary)


def test_twice_while_training(make_job: MakeJob, tmp_path: Path, temporary: Path) -> None:
    task = MARKED.replace("time.sleep(SLOW)", "time.sleep(3 if (HERE / 'slow').exists() else SLOW)")
    write_job(make_job, tmp_path, {"strategy.mesh": {"data": 2}, "train.steps": 1_000_000}, task)
    command = start_command(tmp_path, temporary=temporary)
    workers = pids(tmp_path, 2)
    (tmp_path / "slow").touch()
    time.sleep(0.2)
    for _ in range(4):
        command.send_signal(signal.SIGINT)
        time.sleep(0.3)
    assert "interrupted twice" in ended(command, temporary)
    assert not any(map(alive, workers))
    assert Run.open(tmp_path / "run").summary["status"] == "interrupted"


def test_once_more_while_saving(make_job: MakeJob, tmp_path: Path, temporary: Path) -> None:
    """A second SIGTERM (of a batch system) when the first has ended the run already changes nothing."""
    write_job(make_job, tmp_path, {"strategy.mesh": {"data": 2}, "train.steps": 1_000_000})
    command = start_command(tmp_path, temporary=temporary)
    pids(tmp_path, 2)
    command.send_signal(signal.SIGTERM)
    summary = tmp_path / "run" / "summary.json"
    wait_for(summary.exists, "the summary")
    command.send_signal(signal.SIGTERM)
    assert "verbund resume" in ended(command, temporary)
    assert Run.open(tmp_path / "run").summary["status"] == "interrupted"


def test_while_the_run_is_summed_up(make_job: MakeJob, tmp_path: Path, temporary: Path) -> None:
    write_job(make_job, tmp_path, {"train.steps": 40, "strategy.mesh": {"data": 2}})
    command = start_command(tmp_path, temporary=temporary)
    workers = pids(tmp_path, 2)
    wait_for(lambda: not any(map(alive, workers)), "the training's end")
    command.send_signal(signal.SIGTERM)
    _, errors = command.communicate(timeout=20)
    assert command.returncode == 130
    assert "Traceback" not in errors
    summary = Run.open(tmp_path / "run").summary
    assert (summary["status"], summary["steps"]) == ("done", 40)
    assert (tmp_path / "run" / "report.html").is_file()


def test_predicting(make_job: MakeJob, tmp_path: Path, temporary: Path) -> None:
    write_job(make_job, tmp_path, {"train.steps": 2})
    start_command(tmp_path).communicate(timeout=30)
    (tmp_path / "task.py").write_text(MARKED + "(HERE / 'loaded').touch()\ntime.sleep(60)\n")
    command = start_command(tmp_path, "predict", "run", "data.npz", "--out", "p.parquet", temporary=temporary)
    wait_for((tmp_path / "loaded").exists, "the prediction")
    (server,) = children(command.pid)
    command.send_signal(signal.SIGINT)
    assert "nothing was written" in ended(command, temporary)
    assert not list(tmp_path.glob("*p.parquet*"))
    assert not alive(server)


# -- the blocks ------------------------------------------------------------------------------------------------------


def test_blocks() -> None:
    with Interrupts() as outer:
        with Interrupts() as inner:
            signal.raise_signal(signal.SIGINT)
        assert (outer.count, inner.count) == (0, 1)
        with Interrupts(deferring=True):
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
            assert outer.count == 0
        assert outer.count == 1


def test_the_way_out_is_not_disturbed() -> None:
    cleaned: list[Callable[[], None] | int] = []
    with Interrupts(ending=True) as interrupts:
        try:
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            finally:
                signal.raise_signal(signal.SIGTERM)
                cleaned.append(1)
        except Interrupt:
            cleaned.append(2)
    assert cleaned == [1, 2]
    assert interrupts.count == 2
