"""Few open files: whoever runs out of them says so, and nothing hangs or is left behind."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import MLP, MakeJob
from processes import write_job
from verbund.errors import VerbundError
from verbund.run import Run

FEW = (
    MLP
    + """
import os, resource
whole = model

def model():
    if "preflight" not in open("/proc/self/cmdline").read():
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + MORE, 4096))
    return whole()
"""
)


@pytest.mark.parametrize("more", [1, 3])
def test_a_worker_that_runs_out_of_them(more: int, run_job: Callable[..., Run]) -> None:
    changes = {"strategy.mesh": {"shard": 2}, "train.steps": 3, "cluster.step_deadline": 20}
    with pytest.raises(VerbundError, match="open files") as caught:
        run_job(FEW.replace("MORE", str(more)), changes)
    assert caught.value.exit_status in (1, 3)
    assert "ulimit -n" in str(caught.value.fix)


RAISED = (
    MLP
    + """
import resource
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (4096, 4096)
"""
)


@pytest.mark.parametrize(("limit", "most"), [(12, 12), (64, 4096)])
def test_a_command_that_may_have_few(limit: int, most: int, make_job: MakeJob, tmp_path: Path) -> None:
    """The soft limit is a shell's habit; only the hard one counts for workers."""
    task = RAISED if most > limit else MLP
    write_job(make_job, tmp_path, {"strategy.mesh": {"data": 2}, "train.steps": 3}, task)
    ended = subprocess.run(
        [sys.executable, "-m", "verbund", "train", "job.toml", "--run", "run"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most)),
        check=False,
    )
    assert "Traceback" not in ended.stderr
    if ended.returncode:
        assert limit == most
        assert ended.returncode in (1, 2, 3)
        assert "ulimit -n" in ended.stderr, ended.stderr
