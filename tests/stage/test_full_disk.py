"""A full disk while saving: the run goes on, says so, and the earlier checkpoint is intact."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import MakeJob
from verbund import checkpoint
from verbund.cluster.local import LocalCluster
from verbund.stage import launch

WIDE = """
from torch import nn

def model():
    return nn.Sequential(nn.Linear(12, 4000), nn.ReLU(), nn.Linear(4000, 5))
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "small"
    place.mkdir()
    if (
        os.geteuid() != 0
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", str(place)], capture_output=True
        ).returncode
    ):
        pytest.skip("mounting a small disk needs root")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_the_run_goes_on(small_disk: Path, shared_cluster: LocalCluster, make_job: MakeJob) -> None:
    # One checkpoint takes 0.9 MB of 1.5: the second finds no room, as the first stays until it is whole.
    job = make_job(WIDE, {"train.steps": 6, "checkpoint.every": 2, "strategy.mesh": {"data": 2}})
    run = launch.train(job, small_disk / "run")
    assert run.summary["status"] == "done"
    assert run.summary["steps"] == 6
    assert run.summary["checkpoints"]["failed"] >= 1
    assert any("could not be saved" in warning for warning in run.summary["warnings"])
    path, _ = checkpoint.newest_valid(run.checkpoints)
    assert path.name == "step-00000002"
    assert not list(run.checkpoints.glob(".*"))
