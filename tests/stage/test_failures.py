"""What goes wrong while a run is under way: the first cause is what the user sees, and nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from conftest import MLP, MakeJob
from processes import MARKED, children, gone, parent, pids, start_command, write_job
from verbund.cluster.local import LocalCluster
from verbund.errors import ClusterLost, RunFailed, TaskError
from verbund.run import Run
from verbund.stage import launch

RunJob = Callable[..., Run]


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


def test_what_a_stopped_worker_did_is_told_by_itself(run_job: RunJob) -> None:
    """Not by its last sign of life, which may be from before its first step."""
    task = (
        MLP
        + """
import os, signal, torch
steps = 0

def inputs(batch):
    global steps
    steps += torch.is_grad_enabled()
    if steps == 4 and len(batch["x"]) == 20:
        os.kill(os.getpid(), signal.SIGSTOP)
    return batch["x"]
"""
    )
    changes = {"train.global_batch": 20, "cluster.heartbeat": 9.0, "cluster.lost_after": 2.5}
    with pytest.raises(ClusterLost, match=r"no sign of life for \d s; last known: computing \(step 3\)"):
        run_job(task, {"train.steps": 100, **changes})


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
    data = {"x": np.zeros((200, 12), np.float32), "y": np.zeros(200, np.int64), "number": np.arange(200)}
    changes = {"strategy.mesh": {"data": 3}, "train.steps": 1000, "train.global_batch": 30}
    limits = {"cluster.heartbeat": 0.2, "cluster.step_deadline": 2.0}
    with pytest.raises(ClusterLost, match=r"no progress for 2 s: the others wait for worker \d \(computing"):
        run_job(task, {**changes, **limits}, **data)


@pytest.mark.parametrize("loaders", [0, 1])
@pytest.mark.parametrize("workers", [1, 2])
def test_data_that_do_not_come_are_named(workers: int, loaders: int, run_job: RunJob) -> None:
    task = (
        MLP
        + """
import time, torch

class Hanging(torch.utils.data.Dataset):
    def __len__(self):
        return 200

    def __getitem__(self, index):
        if index == 150:
            time.sleep(1000)
        return {"x": torch.zeros(12), "y": torch.tensor(index % 5)}

def dataset():
    return Hanging()
"""
    )
    changes = {"data.train": None, "train.global_batch": 10, "train.steps": 20, "strategy.mesh": {"data": workers}}
    limits = {"cluster.heartbeat": 0.2, "cluster.step_deadline": 2.0, "data.loaders": loaders}
    with pytest.raises(ClusterLost, match=r"no progress for 2 s: .*worker \d \(waiting for data, step \d") as caught:
        run_job(task, {**changes, **limits})
    assert ("the others wait for" in str(caught.value)) == (workers > 1)
    assert "dataset()" in str(caught.value)


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


def test_nothing_is_left_when_the_supervisor_is_killed(make_job: MakeJob, tmp_path: Path, temporary: Path) -> None:
    changes = {"strategy.mesh": {"data": 2}, "train.steps": 1_000_000, "cluster.orphan_grace": 2.0}
    write_job(make_job, tmp_path, changes)
    command = start_command(tmp_path, temporary=temporary)
    workers = pids(tmp_path, 2)
    server = children(command.pid)
    command.kill()
    command.communicate()
    assert gone([*workers, *server], 6)
    assert not list(temporary.iterdir())


def test_the_warm_server_is_killed(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job(MARKED, {"strategy.mesh": {"data": 2}, "train.steps": 1_000_000})
    struck = []

    def act() -> None:
        workers = pids(tmp_path, 2)
        struck.extend(workers)
        os.kill(parent(workers[0]), signal.SIGKILL)

    thread = threading.Thread(target=act)
    thread.start()
    with pytest.raises(
        ClusterLost, match=r"warm server .*, the parent of all workers, was killed by SIGKILL"
    ) as caught:
        launch.train(job, tmp_path / "run")
    thread.join()
    assert f"`verbund resume {tmp_path / 'run'}` continues" in str(caught.value)
    assert gone(struck, 5)


@pytest.mark.parametrize(
    ("change", "result", "where"),
    [
        ("def inputs(batch):", 'batch["x"]', "computing (step 2)"),
        ("def metrics(output, targets):", "{}", "validating (step 2)"),
    ],
)
def test_what_a_killed_worker_did(change: str, result: str, where: str, run_job: RunJob) -> None:
    # Its signs of life come too seldom to tell.
    task = (
        MLP
        + f"""
import os, signal
from pathlib import Path
RUN = Path(__file__).parent / "run-1"
STEPS = []

{change}
    STEPS.append(0)
    if RUN.exists() and (len(STEPS) == 4 or "metrics" in globals()):  # not in the dry run
        os.kill(os.getpid(), signal.SIGKILL)
    return {result}
"""
    )
    changes = {"validate.every": 2, "data.validation_fraction": 0.2, "cluster.heartbeat": 100.0}
    with pytest.raises(ClusterLost) as caught:
        run_job(task, changes)
    assert f"was killed by SIGKILL while {where}" in str(caught.value)


def test_a_death_in_the_dry_run_leaves_nothing_to_resume(run_job: RunJob, tmp_path: Path) -> None:
    with pytest.raises(ClusterLost, match=r"preflight 0 .* was killed by SIGKILL while checking the task") as caught:
        run_job(MLP + "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    assert "resume" not in str(caught.value)
    assert not (tmp_path / "run-1").exists()


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        ("ValueError('begin ' + 'x' * 50_000_000 + ' end')", r"ValueError.*: begin x+ .*characters.* x+ end"),
        ("Mute()", r"Mute.*: \(its text cannot be had: RuntimeError\)"),
        ("ValueError('\\udc80')", r"ValueError"),
    ],
)
@pytest.mark.parametrize("place", ["loss", "import"])
def test_exceptions_of_strange_texts(raised: str, told: str, place: str, run_job: RunJob) -> None:
    task = (
        MLP
        + f"""
import torch

class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no")

def loss(output, targets):
    raise {raised}
"""
    )
    if place == "import":
        task += f"raise {raised}\n"
    with pytest.raises((RunFailed, TaskError), match=told) as caught:
        run_job(task)
    assert len(str(caught.value)) < 12_000
    assert "task.py" in str(caught.value)
    assert caught.value.trace is None or "in loss" in caught.value.trace or place == "import"


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


def test_an_error_in_layers_of_torchs_own_is_the_models(run_job: RunJob) -> None:
    task = """
from torch import nn

def model():
    return nn.Sequential(nn.Embedding(50, 4), nn.Flatten(), nn.Linear(8, 5))

def inputs(batch):
    return batch["x"].long()
"""
    words = np.zeros((200, 2), np.int64)
    words[190] = 60
    with pytest.raises(RunFailed, match=r"task.py, model\(\): IndexError: index out of range") as caught:
        run_job(task, {"train.global_batch": 10, "train.steps": 30}, x=words, y=np.zeros(200, np.int64))
    assert "randomness" not in str(caught.value)


def test_the_ends_that_follow_a_failure_are_no_losses(run_job: RunJob, tmp_path: Path) -> None:
    """Where all that is known is that a peer was lost, that is told, and nobody is replaced who was told to end."""
    task = MLP + (
        "\nimport sys\nfrom verbund.comm.peer_lost import PeerLost\n\ndef inputs(batch):\n"
        "    if 'verbund.stage.served.train' in sys.modules and len(batch['x']) > 5:\n"
        "        raise PeerLost('nobody is there')\n    return batch['x']\n"
    )
    changes = {"strategy.exchange": {"name": "parameter_server", "servers": 2}, "cluster.replacements": 2}
    with pytest.raises(ClusterLost, match="nobody is there"):
        run_job(task, changes)
    assert '"replacement"' not in (tmp_path / "run-1" / "journal" / "supervisor-0-1.jsonl").read_text()
