"""Parameter servers on hosts whose network is not trusted: the same numbers, over TLS alone, whoever is lost."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import time
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from conftest import MLP, MakeJob, losses, wait_for
from lab import Lab, missing
from lab.runs import VERBUND, train, write
from trained import close
from verbund.run import Run
from verbund.stage import launch

pytestmark = pytest.mark.skipif((why := missing()) is not None, reason=why or "")

SERVED: dict[str, Any] = {
    "cluster.trusted_network": None,
    "strategy.mesh": {"data": 1},
    "strategy.islands": 2,
    "strategy.exchange": {"name": "parameter_server", "servers": 2},
    "data.validation_fraction": 0.2,
}


@pytest.mark.parametrize("mesh", [{"data": 1}, {"data": 2}], ids=["islands of 1", "islands of 2"])
def test_same_numbers_as_on_one_machine(
    mesh: dict[str, int], lab: Lab, make_job: MakeJob, tmp_path: Path, shared_cluster: object
) -> None:
    changes = {**SERVED, "strategy.mesh": mesh}
    here = {key: value for key, value in changes.items() if not key.startswith("cluster")}
    alone = launch.train(make_job(MLP, here), tmp_path / "alone")
    write(lab, make_job, tmp_path, changes)
    done = train(lab, tmp_path)
    assert done.returncode == 0, done.stderr
    assert not [pid for host in (0, 1) for pid in lab.pids(host)]
    run = Run.open(tmp_path / "run")
    assert losses(run) == pytest.approx(losses(alone), rel=1e-6, abs=1e-6)
    close(run, alone)
    moved = [link["sent"] for link in run.summary["network"]["links"]]
    assert len(moved) == 2
    assert all(count > 1000 for count in moved), moved


def start(lab: Lab, folder: Path, steps: int) -> subprocess.Popen[str]:
    """A run under way that has done some steps."""
    command = lab.start(
        0,
        [*VERBUND, "train", "job.toml", "--run", "run", "--json"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    wait_for(lambda: command.poll() is not None or passes(folder) >= steps, "some steps", 60)
    assert command.poll() is None, command.communicate()
    return command


def passes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("passes-*"))


COUNTED = """
from torch import nn
import os, pathlib, time
HERE = pathlib.Path(__file__).parent

def model():
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 5))

def inputs(batch):
    time.sleep(0.02)
    with open(HERE / f"passes-{os.getpid()}", "a") as file:
        file.write("x")
    return batch["x"]
"""
LONG = {**SERVED, "train.steps": 150, "data.validation_fraction": 0.0, "cluster.heartbeat": 0.2}


@pytest.mark.parametrize("way", ["both", "to", "from"])
def test_a_link_that_loses_everything_for_a_while(
    way: Literal["both", "to", "from"], lab: Lab, make_job: MakeJob, tmp_path: Path
) -> None:
    """In both directions or in one: all wait, nobody is replaced, and nothing is done twice."""
    write(lab, make_job, tmp_path, LONG, COUNTED)
    command = start(lab, tmp_path, 40)
    lab.cut(1, way)
    time.sleep(2.5)
    assert command.poll() is None
    lab.restore(1)
    out, errors = command.communicate(timeout=90)
    assert command.returncode == 0, errors
    summary = json.loads(out)
    assert (summary["steps"], summary["failures"]) == (150, [])
    assert summary["servers"]["repeated"] == 0


def test_another_server_on_the_host_of_a_killed_one(
    lab: Lab, make_job: MakeJob, tmp_path: Path, shared_cluster: object
) -> None:
    write(lab, make_job, tmp_path, LONG, COUNTED)
    command = start(lab, tmp_path, 40)
    journal = tmp_path / "run" / "journal"
    first = json.loads((journal / "server-1-1.jsonl").read_text().splitlines()[0])
    assert first["address"] == lab.hosts[1]
    os.kill(first["pid"], signal.SIGKILL)
    out, errors = command.communicate(timeout=90)
    assert command.returncode == 0, errors
    second = json.loads((journal / "server-1-1-1.jsonl").read_text().splitlines()[0])
    assert second["address"] == lab.hosts[1]
    here = {key: value for key, value in LONG.items() if not key.startswith("cluster")}
    alone = launch.train(make_job(COUNTED.replace("time.sleep(0.02)", ""), here), tmp_path / "alone")
    assert json.loads(out)["loss"]["last"] == pytest.approx(alone.summary["loss"]["last"], rel=1e-5)


def test_live_predictions_from_another_host(lab: Lab, make_job: MakeJob, tmp_path: Path) -> None:
    write(lab, make_job, tmp_path, {**LONG, "train.steps": 1_000_000}, COUNTED)
    command = start(lab, tmp_path, 40)
    np.savez(tmp_path / "new.npz", x=np.random.default_rng(1).normal(size=(40, 12)).astype(np.float32))
    for name in ("address", "secret"):
        assert stat.S_IMODE((tmp_path / "run" / "servers" / name).stat().st_mode) == 0o600
    read = lab.run(1, [*VERBUND, "predict", "run", "new.npz", "--live", "--json"], cwd=tmp_path, timeout=120)
    command.send_signal(signal.SIGINT)
    _, errors = command.communicate(timeout=60)
    assert read.returncode == 0, read.stderr
    assert json.loads(read.stdout)["versions"]["oldest"] > 0
    assert command.returncode == 130, errors
    assert not (tmp_path / "run" / "servers").exists()
