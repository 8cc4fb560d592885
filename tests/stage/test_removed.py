"""A run's directory that is taken away while it is trained: the run has failed, and says why."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import MakeJob, wait_for
from verbund.errors import RunFailed
from verbund.run import Run

RunJob = Callable[..., Run]

GATED = """
from torch import nn
import pathlib, time
HERE = pathlib.Path(__file__).parent
SEEN = []

def model():
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 5))

def inputs(batch):
    SEEN.append(0)
    if len(SEEN) == 4:
        (HERE / "there").touch()
        while not (HERE / "go").exists():
            time.sleep(0.01)
    return batch["x"]
"""


def when_there(folder: Path, act: Callable[[], None]) -> threading.Thread:
    """Acts while the task is in its fourth step, then lets it go on."""

    def run() -> None:
        wait_for((folder / "there").exists, "the fourth step")
        try:
            act()
        finally:
            (folder / "go").touch()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.parametrize("part", ["", "journal", "job.toml"])
def test_what_was_removed_is_named(part: str, run_job: RunJob, tmp_path: Path) -> None:
    gone = tmp_path / "run-1" / part
    thread = when_there(tmp_path, lambda: gone.unlink() if gone.is_file() else shutil.rmtree(gone))
    with pytest.raises(RunFailed, match="was removed or renamed") as caught:
        run_job(GATED, {"train.steps": 8})
    thread.join()
    assert caught.value.where == str(gone)
    if not part:
        assert not gone.exists(), "half a run is of no use to anybody"


def test_a_save_into_nothing_ends_the_run(run_job: RunJob, tmp_path: Path) -> None:
    thread = when_there(tmp_path, lambda: os.rename(tmp_path / "run-1", tmp_path / "elsewhere"))
    with pytest.raises(RunFailed, match="was removed or renamed"):
        run_job(GATED, {"train.steps": 10_000_000, "checkpoint.every": 5, "strategy.mesh": {"data": 2}})
    thread.join()


def test_checkpoints_that_were_removed_are_saved_again(run_job: RunJob, tmp_path: Path) -> None:
    thread = when_there(tmp_path, lambda: os.rename(tmp_path / "run-1" / "checkpoints", tmp_path / "elsewhere"))
    run = run_job(GATED, {"train.steps": 8, "checkpoint.every": 2})
    thread.join()
    assert (run.checkpoints / "step-00000008" / "manifest.json").is_file()


def test_the_command_says_so(make_job: MakeJob, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(make_job(GATED, {"train.steps": 8}).toml())
    thread = when_there(tmp_path, lambda: shutil.rmtree(tmp_path / "run"))
    command = [sys.executable, "-m", "verbund", "train", "job.toml", "--run", "run", "--json"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    thread.join()
    assert ended.returncode == 1
    assert "was removed or renamed" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "was removed or renamed" in json.loads(ended.stdout)["cause"]["what"]
