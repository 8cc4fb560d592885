"""A command that stands still for a while (Ctrl-Z): the run goes on, and goes on after it."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

from conftest import MakeJob, wait_for
from processes import pids, start_command, write_job
from verbund.run import Run


def test_longer_than_lost_after(make_job: MakeJob, tmp_path: Path) -> None:
    limits = {"cluster.heartbeat": 0.1, "cluster.lost_after": 1.0, "cluster.step_deadline": 2.0}
    write_job(make_job, tmp_path, {"strategy.mesh": {"data": 2}, "train.steps": 250, **limits})
    command = start_command(tmp_path)
    pids(tmp_path, 2)
    for number in (signal.SIGTSTP, signal.SIGSTOP):
        os.kill(command.pid, number)
        time.sleep(2.2)
        os.kill(command.pid, signal.SIGCONT)
        time.sleep(0.3)
    _, errors = command.communicate(timeout=60)
    assert command.returncode == 0, errors
    assert Run.open(tmp_path / "run").summary["steps"] == 250


def test_workers_do_not_wait_for_it(make_job: MakeJob, tmp_path: Path) -> None:
    # Far more signs of life and reports of progress than the kernel keeps for a process that does not read them.
    limits = {"cluster.heartbeat": 0.0005, "cluster.orphan_grace": 1.0}
    write_job(make_job, tmp_path, {"strategy.mesh": {"data": 2}, "train.steps": 300, **limits})
    command = start_command(tmp_path)
    pids(tmp_path, 2)
    os.kill(command.pid, signal.SIGSTOP)
    journal = tmp_path / "run" / "journal" / "worker-0-1.jsonl"
    wait_for(lambda: '"t":"end"' in journal.read_text(), "the end of the workers, which stand still too,", 30)
    os.kill(command.pid, signal.SIGCONT)
    _, errors = command.communicate(timeout=30)
    assert command.returncode == 0, errors
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["checkpoints"]["last_step"]) == ("done", 300, 300)
