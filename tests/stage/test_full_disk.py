"""A full disk while saving: the run goes on and says so, and has failed only if its result could not be saved."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import MakeJob
from verbund import checkpoint
from verbund.cluster.local import LocalCluster
from verbund.errors import RunFailed
from verbund.run import Run
from verbund.stage import launch
from verbund.stage.export import export

WIDE = """
from torch import nn

def model():
    return nn.Sequential(nn.Linear(12, 4000), nn.ReLU(), nn.Linear(4000, 5))
"""


def test_the_trained_model_could_not_be_saved(
    small_disk: Path, shared_cluster: LocalCluster, make_job: MakeJob
) -> None:
    # One checkpoint takes 0.9 MB of 1.5: the second finds no room, as the first stays until it is whole.
    job = make_job(WIDE, {"train.steps": 6, "checkpoint.every": 2, "strategy.mesh": {"data": 2}})
    with pytest.raises(RunFailed, match=r"after step 6 could not be saved: worker \d: .*the disk is full") as caught:
        launch.train(job, small_disk / "run")
    run = Run.open(small_disk / "run")
    assert f"verbund resume {run.path}" in str(caught.value)
    assert run.summary["status"] == "failed"
    assert "the disk is full" in run.summary["cause"]["what"]
    assert run.summary["steps"] == 6
    assert run.summary["checkpoints"]["failed"] >= 1
    assert any("could not be saved" in warning for warning in run.summary["warnings"])
    path, _ = checkpoint.newest_valid(run.checkpoints)
    assert path.name == "step-00000002"
    assert not list(run.checkpoints.glob(".*"))


def test_a_failed_save_that_a_later_one_makes_good(
    small_disk: Path, shared_cluster: LocalCluster, make_job: MakeJob
) -> None:
    full = small_disk / "full"
    full.write_bytes(b"0" * 1_400_000)
    task = (
        WIDE.replace("4000", "1000")
        + f"""
import pathlib
FULL = pathlib.Path({str(full)!r})
SEEN = set()

def inputs(batch):
    SEEN.add(len(SEEN))
    if len(SEEN) == 5:  # the save of step 4 has waited for that of step 2, which has failed
        FULL.unlink(missing_ok=True)
    return batch["x"]
"""
    )
    run = launch.train(make_job(task, {"train.steps": 6, "checkpoint.every": 2}), small_disk / "run")
    assert run.summary["status"] == "done"
    assert any("step 2 could not be saved" in warning for warning in run.summary["warnings"])
    assert checkpoint.newest_valid(run.checkpoints)[0].name == "step-00000006"


def test_no_step_is_missing_in_the_summary(small_disk: Path, shared_cluster: LocalCluster, make_job: MakeJob) -> None:
    """The journal cannot be written while the first steps are done, and can be again later."""
    full = small_disk / "full"
    task = (
        WIDE.replace("4000", "1000")
        + f"""
import pathlib, torch
FULL = pathlib.Path({str(full)!r})
SEEN = set()

def inputs(batch):
    if torch.is_grad_enabled() and pathlib.Path({str(small_disk / "run")!r}).exists():
        SEEN.add(len(SEEN))
    if len(SEEN) == 1 and not FULL.exists():
        with open(FULL, "wb", buffering=0) as file:
            try:
                while file.write(bytes(4096)):
                    pass
            except OSError:
                pass
    if len(SEEN) == 100:
        FULL.unlink(missing_ok=True)
    return batch["x"]
"""
    )
    changes = {"train.steps": 120, "train.global_batch": 20, "checkpoint.every": 10}
    run = launch.train(make_job(task, changes), small_disk / "run")
    assert run.summary["samples"] == 120 * 20 - 10 * 17
    assert [step for step, _ in run.summary["loss"]["curve"]] == list(range(120))


@pytest.mark.parametrize("form", ["safetensors", "state-dict"])
def test_an_export_that_does_not_fit(
    form: str, small_disk: Path, shared_cluster: LocalCluster, make_job: MakeJob, tmp_path: Path
) -> None:
    run = launch.train(make_job(WIDE.replace("4000", "30_000")), tmp_path / "run")  # 2.2 MB
    with pytest.raises(RunFailed, match=r"small: the disk is full .* Free space there"):
        export(run.path, small_disk / "out", form=form)
    assert list(small_disk.iterdir()) == []
