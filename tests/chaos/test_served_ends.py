"""How runs with parameter servers end when something is wrong: with its first cause, and nothing is left."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chaos.striking import Striker, living
from chaos.test_served_runs import COUNTER, REPLICAS, counted
from conftest import MLP, MakeJob, losses, wait_for
from processes import gone, start_command, write_job
from trained import close, parameters
from verbund.errors import ClusterLost, RunFailed, TaskError
from verbund.job import parse_strategy
from verbund.run import Run
from verbund.stage import launch

RunJob = Callable[..., Run]
SERVED = parse_strategy("islands=2,exchange=parameter_server,exchange.servers=2")
SLOW = MLP + "\nimport time\n\ndef inputs(batch):\n    time.sleep(0.02)\n    return batch['x']\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_and_resumed(
    number: signal.Signals, shared_cluster: object, make_job: MakeJob, tmp_path: Path, temporary: Path
) -> None:
    strategy = parse_strategy(REPLICAS + ",exchange.consistency=asynchronous")
    steps = {"train.steps": 100, "train.optimizer": {"name": "sgd", "lr": 1.0}}
    write_job(make_job, tmp_path, {**strategy, **steps}, COUNTER)
    command = start_command(tmp_path, temporary=temporary)
    processes = wait_for(lambda: len(living(tmp_path / "run")) == 5 and living(tmp_path / "run"), "the processes")
    time.sleep(0.3)
    command.send_signal(number)
    _, errors = command.communicate(timeout=20)
    assert command.returncode == 130, errors
    assert "verbund resume" in errors
    assert gone(list(processes.values()), 10)
    assert not list(temporary.iterdir())
    run = Run.open(tmp_path / "run")
    assert 0 < run.summary["steps"] < 100
    counted(launch.resume(tmp_path / "run"), 100)


def test_nothing_is_left_when_the_command_is_killed(make_job: MakeJob, tmp_path: Path, temporary: Path) -> None:
    write_job(make_job, tmp_path, {**SERVED, "train.steps": 100_000, "cluster.orphan_grace": 1}, SLOW)
    command = start_command(tmp_path, temporary=temporary)
    processes = wait_for(lambda: len(living(tmp_path / "run")) == 5 and living(tmp_path / "run"), "the processes")
    command.kill()
    command.communicate(timeout=20)
    assert gone(list(processes.values()), 10)
    assert not list(temporary.iterdir())


def test_the_budget_of_replacements_is_spent(shared_cluster: object, make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job(SLOW, {**SERVED, "train.steps": 100_000, "cluster.replacements": 1})
    striker = Striker(tmp_path / "run", 5, [(0.1, ["worker 0"], signal.SIGKILL), (2.5, ["worker 1"], signal.SIGKILL)])
    striker.start()
    with pytest.raises(ClusterLost, match=r"worker 1 .*was killed by SIGKILL.*; 1 loss within") as caught:
        launch.train(job, tmp_path / "run")
    striker.end()
    assert caught.value.exit_status == 3
    assert gone(list(striker.seen), 10)


def test_a_single_server_without_a_log(shared_cluster: object, make_job: MakeJob, tmp_path: Path) -> None:
    strategy = parse_strategy("islands=2,exchange=parameter_server,exchange.log=false")
    striker = Striker(tmp_path / "run", 4, [(0.1, ["server 0"], signal.SIGKILL)])
    striker.start()
    with pytest.raises(ClusterLost, match="server 0 was lost, and nobody else has block"):
        launch.train(make_job(SLOW, {**strategy, "train.steps": 100_000}), tmp_path / "run")
    striker.end()
    assert gone(list(striker.seen), 10)


def test_more_servers_are_lost_at_once_than_there_are_replicas(
    shared_cluster: object, make_job: MakeJob, tmp_path: Path
) -> None:
    striker = Striker(tmp_path / "run", 5, [(0.2, ["server 0", "server 1"], signal.SIGKILL)])
    striker.start()
    with pytest.raises(ClusterLost, match=r"server \d was lost, and nobody else has block"):
        launch.train(make_job(SLOW, {**SERVED, "train.steps": 100_000}), tmp_path / "run")
    striker.end()
    assert gone(list(striker.seen), 10)


def test_an_exception_of_the_model_is_what_is_told(run_job: RunJob, tmp_path: Path) -> None:
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
    x = np.random.default_rng(1).normal(size=(200, 12)).astype(np.float32)
    with pytest.raises((RunFailed, TaskError), match="a bad day") as caught:
        run_job(task, {**SERVED, "train.steps": 40}, x=x, y=y)
    assert caught.value.exit_status == 1
    assert Run.open(tmp_path / "run-1").summary["servers"]["replacements"] == []


@pytest.mark.parametrize("consistency", ["bulk_synchronous", "asynchronous"])
def test_a_loss_that_is_no_number(consistency: str, run_job: RunJob) -> None:
    changes = {**SERVED, "strategy.exchange.consistency": consistency, "train.steps": 200}
    with pytest.raises(RunFailed, match=r"the loss became (nan|inf)"):
        run_job(MLP, {**changes, "train.optimizer": {"name": "sgd", "lr": 1e12}})


@pytest.mark.parametrize("small_disk", ["1500k"], indirect=True)
def test_a_full_disk_for_the_log(
    small_disk: Path, shared_cluster: object, make_job: MakeJob, capfd: pytest.CaptureFixture[str]
) -> None:
    strategy = parse_strategy("islands=2,exchange=parameter_server")
    wide = MLP.replace("16", "800")
    with pytest.raises(RunFailed, match=r"the disk is full|No space left") as caught:
        launch.train(make_job(wide, {**strategy, "train.steps": 500}), small_disk / "run")
    assert "server-0" in str(caught.value)
    assert not (small_disk / "run" / "servers").exists()
    assert Run.open(small_disk / "run").summary["status"] == "failed"


@pytest.mark.parametrize("small_disk", ["1500k"], indirect=True)
def test_a_full_disk_for_checkpoints(small_disk: Path, shared_cluster: object, make_job: MakeJob) -> None:
    wide = MLP.replace("16", "4000")
    with pytest.raises(RunFailed, match=r"after step 6 could not be saved: server \d: .*the disk is full"):
        launch.train(make_job(wide, {**SERVED, "train.steps": 6, "checkpoint.every": 2}), small_disk / "run")
    run = Run.open(small_disk / "run")
    assert run.summary["checkpoints"]["failed"] >= 1
    assert not list(run.checkpoints.glob(".*"))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("exchange.replicas=2,exchange.servers=2", "2 replicas need more than 2 servers"),
        ("exchange.servers=0", "servers"),
        ("exchange.consistency=eventual", "consistency"),
        ("exchange.staleness=2", "bounded_staleness"),
        ("exchange.backup=2", "backup"),
        ("exchange.backup=1,exchange.consistency=asynchronous", "backup"),
        ("exchange.block_bytes=10", "block_bytes"),
        ("exchange.every=3", "every"),
        ("compression=int8", "compression"),
    ],
)
def test_settings_that_do_not_fit(settings: str, said: str, command: Any, make_job: MakeJob, tmp_path: Path) -> None:
    write_job(make_job, tmp_path, {})
    ended = command("train", "job.toml", "--strategy", f"islands=2,exchange=parameter_server,{settings}")
    assert ended.status == 2, ended.err
    assert said in ended.err
    assert "Traceback" not in ended.err
    assert not (tmp_path / "runs").exists()


MOMENTUM = {"train.optimizer": {"name": "adamw", "lr": 0.01}, "data.validation_fraction": 0.2}
CHAINS = [
    ["islands=2,exchange=parameter_server,exchange.servers=2", "data=2"],
    ["data=2", "islands=2,exchange=parameter_server,exchange.servers=2"],
    [
        "islands=2,exchange=parameter_server,exchange.servers=2",
        "islands=3,exchange=parameter_server,exchange.servers=3,exchange.replicas=2",
    ],
    ["islands=3,exchange=parameter_server,exchange.servers=3", "islands=1,data=2,exchange=parameter_server"],
]


@pytest.mark.parametrize("chain", CHAINS)
def test_resumed_under_another_strategy(chain: list[str], run_job: RunJob) -> None:
    alone = run_job(MLP, {**MOMENTUM, "train.steps": 16})
    run = run_job(MLP, {**MOMENTUM, **parse_strategy(chain[0]), "train.steps": 8})
    mesh = {"strategy.mesh": {"data": 1}, "strategy.islands": 1, "strategy.exchange": "all_reduce"}
    run = launch.resume(run.path, {**mesh, **parse_strategy(chain[1]), "train.steps": 16})
    assert run.summary["steps"] == 16
    close(run, alone, 1e-4)
    np.testing.assert_allclose(losses(run)[8:], losses(alone)[8:], rtol=1e-4)
    assert json.dumps(sorted(parameters(run))) == json.dumps(sorted(parameters(alone)))


def test_a_server_that_is_lost_before_the_last_save(shared_cluster: object, make_job: MakeJob, tmp_path: Path) -> None:
    """It is lost while all rest, and the leader asks a server that is gone to save."""
    task = (
        MLP
        + f"""
import json, os, pathlib, signal, torch

SERVER = pathlib.Path({str(tmp_path / "run/journal/server-1-1.jsonl")!r})
STRUCK = pathlib.Path({str(tmp_path / "struck")!r})

def inputs(batch):
    if not torch.is_grad_enabled() and SERVER.exists() and not STRUCK.exists():
        STRUCK.touch()
        os.kill(json.loads(SERVER.read_text().splitlines()[0])["pid"], signal.SIGKILL)
    return batch["x"]
"""
    )
    changes = {"train.steps": 20, "data.validation_fraction": 0.2}
    run = launch.train(make_job(task, {**SERVED, **changes}), tmp_path / "run")
    assert (tmp_path / "struck").exists()
    assert run.summary["status"] == "done"
    assert run.summary["checkpoints"]["failed"] == 0
    close(run, launch.train(make_job(MLP, changes), tmp_path / "alone"), 1e-4)
