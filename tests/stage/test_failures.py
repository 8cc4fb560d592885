"""What goes wrong while a run is under way: the first cause is what the user sees, and nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import MLP, MakeJob
from verbund.cluster.local import LocalCluster
from verbund.errors import ClusterLost, RunFailed
from verbund.run import Run
from verbund.stage import launch

RunJob = Callable[..., Run]

# A task whose workers tell who they are and when, so that a test can strike one of them.
MARKED = (
    MLP
    + """
import os, pathlib, time
HERE = pathlib.Path(__file__).parent
SLOW = float(os.environ.get("SLOW", 0.01))

def inputs(batch):
    time.sleep(SLOW)
    (HERE / f"pid-{os.getpid()}").touch()
    return batch["x"]
"""
)


def pids(folder: Path, count: int, seconds: float = 20.0) -> list[int]:
    """The pids of workers that are alive and computing."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        living = [int(path.name[4:]) for path in folder.glob("pid-*") if alive(int(path.name[4:]))]
        if len(living) >= count:
            return sorted(living)
        time.sleep(0.02)
    raise AssertionError(f"{count} workers did not start")


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pids_: list[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(alive(pid) for pid in pids_):
            return True
        time.sleep(0.05)
    return False


def test_an_exception_in_one_workers_loss(run_job: RunJob, tmp_path: Path) -> None:
    task = (
        MLP
        + """
import torch
from torch.nn import functional

def loss(output, targets):
    if torch.is_grad_enabled() and 3 in targets.tolist():
        raise ValueError("a bad day")
    return functional.cross_entropy(output, targets, reduction="none")
"""
    )
    import numpy as np

    y = np.zeros(200, np.int64)
    y[150] = 3
    with pytest.raises(RunFailed) as caught:
        run_job(task, {"strategy.mesh": {"data": 3}, "train.global_batch": 30, "train.steps": 100}, rows=200,
                x=np.zeros((200, 12), np.float32), y=y)  # fmt: skip
    text = str(caught.value)
    assert "ValueError: a bad day" in text
    assert "task.py, line" in text
    assert "(step " in text
    assert "samples " in text
    summary = json.loads((tmp_path / "run-1" / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert "a bad day" in summary["cause"]["what"]


def test_a_loss_that_is_not_finite(run_job: RunJob) -> None:
    with pytest.raises(RunFailed, match=r"the loss became (nan|inf)"):
        run_job(
            MLP,
            {"train.optimizer": {"name": "sgd", "lr": 1e30}, "train.steps": 20, "strategy.mesh": {"data": 2}},
        )


def strike(folder: Path, number: int, victim: int = 1, workers: int = 3) -> threading.Thread:
    def act() -> None:
        os.kill(pids(folder, workers)[victim], number)

    thread = threading.Thread(target=act)
    thread.start()
    return thread


def test_a_killed_worker_is_named(run_job: RunJob, tmp_path: Path) -> None:
    thread = strike(tmp_path, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(ClusterLost) as caught:
        run_job(MARKED, {"strategy.mesh": {"data": 3}, "train.steps": 100_000})
    thread.join()
    assert "was killed by SIGKILL" in str(caught.value)
    assert "worker " in str(caught.value)
    assert caught.value.exit_status == 3
    assert time.monotonic() - start < 15
    assert gone([int(p.name[4:]) for p in tmp_path.glob("pid-*")], 5)


def test_a_stopped_worker_is_named(run_job: RunJob, tmp_path: Path) -> None:
    thread = strike(tmp_path, signal.SIGSTOP)
    changes = {"cluster.heartbeat": 0.2, "cluster.lost_after": 1.5}
    with pytest.raises(ClusterLost, match="no sign of life"):
        run_job(MARKED, {"strategy.mesh": {"data": 3}, "train.steps": 100_000, **changes})
    thread.join()
    assert gone([int(p.name[4:]) for p in tmp_path.glob("pid-*")], 5)


def test_a_worker_that_does_not_go_on_is_named(run_job: RunJob, tmp_path: Path) -> None:
    task = (
        MLP
        + """
import time, torch

def inputs(batch):
    if torch.is_grad_enabled() and 150 in batch["number"].tolist() and len(batch["number"]) < 30:
        time.sleep(1000)
    return batch["x"]
"""
    )
    import numpy as np

    data = {"x": np.zeros((200, 12), np.float32), "y": np.zeros(200, np.int64), "number": np.arange(200)}
    changes = {"strategy.mesh": {"data": 3}, "train.steps": 1000, "train.global_batch": 30}
    limits = {"cluster.heartbeat": 0.2, "cluster.step_deadline": 2.0}
    with pytest.raises(ClusterLost, match=r"no progress for 2 s: the others wait for worker \d \(computing"):
        run_job(task, {**changes, **limits}, **data)


def start_command(job_folder: Path, *more: str, environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "verbund", "train", "job.toml", "--run", "run", *more],
        cwd=job_folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {})},
    )


def write_job(make_job: MakeJob, folder: Path, changes: dict[str, Any]) -> None:
    job = make_job(MARKED, changes)
    (folder / "job.toml").write_text(job.toml())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_with_a_checkpoint(number: signal.Signals, make_job: MakeJob, tmp_path: Path) -> None:
    write_job(make_job, tmp_path, {"strategy.mesh": {"data": 2}, "train.steps": 1_000_000})
    command = start_command(tmp_path)
    workers = pids(tmp_path, 2)
    command.send_signal(number)
    _, errors = command.communicate(timeout=20)
    assert command.returncode == 130
    assert "resume" in errors
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert summary["steps"] > 0
    assert list((tmp_path / "run" / "checkpoints").glob("step-*/manifest.json"))
    assert gone(workers, 5)


def test_nothing_is_left_when_the_supervisor_is_killed(make_job: MakeJob, tmp_path: Path) -> None:
    changes = {"strategy.mesh": {"data": 2}, "train.steps": 1_000_000, "cluster.orphan_grace": 2.0}
    write_job(make_job, tmp_path, changes)
    meetings = set(Path("/tmp").glob("verbund-*"))
    command = start_command(tmp_path)
    workers = pids(tmp_path, 2)
    children = Path(f"/proc/{command.pid}/task/{command.pid}/children").read_text().split()
    command.kill()
    command.communicate()
    assert gone([*workers, *map(int, children)], 6)
    assert set(Path("/tmp").glob("verbund-*")) <= meetings


def test_the_warm_server_is_killed(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job(MARKED, {"strategy.mesh": {"data": 2}, "train.steps": 1_000_000})
    struck = []

    def act() -> None:
        workers = pids(tmp_path, 2)
        struck.extend(workers)
        status = Path(f"/proc/{workers[0]}/status").read_text()
        os.kill(int(status.partition("PPid:")[2].split()[0]), signal.SIGKILL)

    thread = threading.Thread(target=act)
    thread.start()
    with pytest.raises(ClusterLost, match="warm server"):
        launch.train(job, tmp_path / "run")
    thread.join()
    assert gone(struck, 5)


def test_the_shared_cluster_lives_on(run_job: RunJob, warm: LocalCluster) -> None:
    assert run_job().summary["status"] == "done"


@pytest.mark.parametrize("every", [2, "end"])
def test_a_loss_that_diverges_speaks_of_a_checkpoint_only_if_there_is_one(every: int | str, run_job: RunJob) -> None:
    task = (
        MLP
        + """
class Worse(nn.Sequential):
    calls = 0
    def forward(self, x):
        if self.training:
            Worse.calls += 1
        return super().forward(x) * (float("nan") if Worse.calls > 4 else 1.0)
def model():
    return Worse(nn.Linear(12, 5))
"""
    )
    with pytest.raises(RunFailed, match="the loss became nan in step 4") as caught:
        run_job(task, {"checkpoint.every": every, "train.steps": 8})
    assert ("the checkpoint of step 4 is from before" in str(caught.value)) == (every == 2)
