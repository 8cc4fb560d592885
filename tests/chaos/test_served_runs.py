"""Whole runs with parameter servers, of which processes are killed and stopped: nothing lost, nothing doubled.

The model has a parameter of which every update is exactly 1, so that it counts them.
"""

from __future__ import annotations

import gc
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chaos.striking import Striker, storm
from conftest import MakeJob
from processes import gone
from trained import newest, parameters
from verbund import checkpoint
from verbund.cluster.local import LocalCluster
from verbund.job import parse_strategy
from verbund.run import Run
from verbund.stage import launch

KILL, STOP = signal.SIGKILL, signal.SIGSTOP
STEPS = 60
COUNTER = """
import time
import torch
from torch import nn

class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.count = nn.Parameter(torch.zeros(64))
        self.others = nn.Linear(12, 200)

    def forward(self, x):
        return -self.count.sum().expand(len(x)) + 0.0 * self.others(x).sum(-1)

def model():
    return Counter()

def inputs(batch):
    time.sleep(0.01)
    return batch["x"]

def loss(output, targets):
    return output
"""
LEARNS = """
import time
from torch import nn

def model():
    return nn.Sequential(nn.Linear(12, 200), nn.Tanh(), nn.Linear(200, 5))

def inputs(batch):
    time.sleep(0.01)
    return batch["x"]
"""
CHANGES: dict[str, Any] = {
    "train.steps": STEPS,
    "train.optimizer": {"name": "sgd", "lr": 1.0},
    "cluster.heartbeat": 0.2,
    "cluster.lost_after": 1.0,
    "cluster.step_deadline": 30,
    "checkpoint.every": 30,
}
MODES = ["bulk_synchronous", "bounded_staleness", "asynchronous"]
REPLICAS = "islands=2,exchange=parameter_server,exchange.servers=2,exchange.block_bytes=1024"
LOG = "islands=2,exchange=parameter_server,exchange.block_bytes=1024"

Disturbed = Callable[..., tuple[Run, Striker]]


@pytest.fixture
def disturbed(shared_cluster: LocalCluster, make_job: MakeJob, tmp_path: Path) -> Disturbed:
    """Trains under a schedule of strikes."""
    count = 0

    def train(task: str, strategy: str, schedule: list[Any], **changes: Any) -> tuple[Run, Striker]:
        nonlocal count
        count += 1
        job = make_job(task, {**CHANGES, **parse_strategy(strategy), **changes})
        directory = tmp_path / f"run-{count}"
        striker = Striker(directory, job.world + job.strategy.exchange.servers + 1, schedule)
        striker.start()
        try:
            run = launch.train(job, directory)
        finally:
            striker.end()
            assert gone(list(striker.seen), 10), "processes are left"
            assert _sockets(shared_cluster) == 2, "sockets are left"  # where it listens, and its warm server's line
            assert not (directory / "servers").exists()
        return run, striker

    return train


def _sockets(cluster: LocalCluster) -> int:
    """Those in the folder where the processes of the runs meet: the supervisor's at least."""
    gc.collect()  # a former test's failure refers to its run, and that to its failure
    found = [line for line in Path("/proc/net/unix").read_text().splitlines() if str(cluster.scratch) in line]
    assert found, "no socket is seen at all"
    return len(found)


def whole(run: Run, steps: int = STEPS) -> None:
    """All steps are done, all samples counted once, and the checkpoint is there."""
    summary = run.summary
    assert (summary["status"], summary["steps"]) == ("done", steps)
    sizes = [37, 37, 37, 37, 37, 18]
    assert summary["samples"] == sum(sizes[step % 6] for step in range(steps))
    path, _ = checkpoint.newest_valid(run.checkpoints)
    assert path.name == f"step-{steps:08d}"
    assert not list(run.checkpoints.glob(".*"))


def counted(run: Run, steps: int = STEPS) -> None:
    whole(run, steps)
    found = parameters(run)["count"].numpy()
    np.testing.assert_allclose(found, steps, atol=0.01)  # shares of a step are rounded


STRIKES: dict[str, list[tuple[float, list[str], signal.Signals]]] = {
    "worker": [(0.3, ["worker 1"], KILL)],
    "server": [(0.3, ["server 0"], KILL)],
    "coordinator": [(0.3, ["coordinator 0"], KILL)],
    "server-and-coordinator": [(0.3, ["server 0", "coordinator 0"], KILL)],
    "worker-and-server": [(0.3, ["worker 0", "server 0"], KILL)],
    "workers": [(0.3, ["worker 0", "worker 1"], KILL)],
    "stopped-worker": [(0.3, ["worker 0"], STOP)],
    "stopped-server": [(0.3, ["server 0"], STOP)],
    "stopped-coordinator": [(0.3, ["coordinator 0"], STOP)],
}


@pytest.mark.parametrize("who", STRIKES)
def test_updates_are_counted_once(who: str, disturbed: Disturbed) -> None:
    run, striker = disturbed(
        COUNTER, f"{REPLICAS if 'server' in who else LOG},exchange.consistency=asynchronous", STRIKES[who]
    )
    assert len(striker.struck) == len(STRIKES[who][0][1])
    counted(run)
    assert len(run.summary["servers"]["replacements"]) == len(striker.struck)


def test_clipping_goes_on_without_late_shares(disturbed: Disturbed) -> None:
    """A server is killed, a worker stopped: the others find the norms of what counts. A gradient is 64 ones."""
    strategy = f"{REPLICAS},exchange.backup=1"
    strikes = [(0.3, ["server 0"], KILL), (0.5, ["worker 1"], STOP)]
    run, striker = disturbed(COUNTER, strategy, strikes, **{"train.clip_norm": 0.8})
    assert len(striker.struck) == 2
    assert (run.summary["status"], run.summary["steps"]) == ("done", STEPS)
    np.testing.assert_allclose(parameters(run)["count"].numpy(), STEPS * 0.8 / 8, rtol=1e-3)


@pytest.mark.parametrize("who", ["server", "coordinator", "worker"])
def test_what_compression_left_out_is_counted_once(who: str, disturbed: Disturbed) -> None:
    """Of each push three of the 64 values travel; what servers have and what workers keep comes to all of them."""
    top_k = {"name": "top_k", "density": 0.05, "warmup": 0}
    strategy = f"{REPLICAS},exchange.consistency=asynchronous"
    run, striker = disturbed(COUNTER, strategy, STRIKES[who], **{"strategy.exchange.compression": top_k})
    assert striker.struck
    whole(run)
    with newest(run) as saved:
        kept = saved.read("exchange", "compression/error/count").sum(0)
    found = (parameters(run)["count"] - kept).numpy()
    assert kept.abs().max() > 1.0
    if who == "worker":  # what it had kept is lost with it, and nothing comes twice
        assert (found < STEPS + 0.01).all()
        assert (found > STEPS / 2).all()
    else:
        np.testing.assert_allclose(found, STEPS, atol=0.01)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kept", ["replicas", "log"])
@pytest.mark.parametrize("seed", [1])
def test_a_storm(seed: int, kept: str, mode: str, disturbed: Disturbed) -> None:
    strategy = f"{REPLICAS if kept == 'replicas' else LOG},exchange.consistency={mode}"
    targets = ["worker 0", "worker 1", "server 0", "coordinator 0", *["server 1"] * (kept == "replicas")]
    # Where there are replicas two servers may not be lost at once: one of them is struck.
    if kept == "replicas":
        targets.remove(f"server {seed % 2}")
    run, striker = disturbed(COUNTER, strategy, storm(seed, targets, 4, (0.1, 1.2)))
    assert striker.struck
    counted(run)


@pytest.mark.parametrize("kept", ["replicas", "log"])
def test_the_numbers_are_those_of_an_undisturbed_run(kept: str, disturbed: Disturbed) -> None:
    strategy = REPLICAS if kept == "replicas" else LOG
    more: dict[str, Any] = {"train.optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9}}
    if kept == "replicas":
        more["train.clip_norm"] = 0.3
    calm, _ = disturbed(LEARNS, "data=1", [], **more)
    struck = [(0.2, ["server 0"], KILL), (0.9, ["worker 0"], KILL), (1.2, ["coordinator 0"], KILL)]
    run, striker = disturbed(LEARNS, strategy, struck, **more)
    assert len(striker.struck) == 3
    whole(run)
    assert run.summary["loss"]["last"] == pytest.approx(calm.summary["loss"]["last"], abs=1e-5)
    for name, values in parameters(calm).items():
        np.testing.assert_allclose(values, parameters(run)[name], rtol=1e-4, atol=1e-5, err_msg=name)
