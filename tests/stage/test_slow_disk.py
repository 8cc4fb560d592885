"""A disk that takes long to write: training goes on meanwhile, saves do not pile up, and nobody is taken for lost."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest

from conftest import MLP, losses
from verbund import checkpoint
from verbund.run import Run

SECONDS = 0.3
"""What a sync takes: more than a heartbeat; those of a commit take longer together than a process may be silent."""
SLOW = (
    MLP
    + f"""
import os, pathlib, threading, time, torch
HERE = pathlib.Path(__file__).parent
fsync = os.fsync
steps = under_way = 0

def slow(descriptor):
    global under_way
    under_way += 1
    before = steps
    time.sleep({SECONDS})
    fsync(descriptor)
    under_way -= 1
    with open(HERE / "syncs", "a") as file:
        file.write(f"{{steps - before}} {{threading.current_thread().name}} {{under_way}}\\n")

os.fsync = slow

def inputs(batch):
    global steps
    steps += torch.is_grad_enabled()
    time.sleep(0.01)
    return batch["x"]
"""
)


def test_training_goes_on_while_it_writes(run_job: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {
        "strategy.mesh": {"data": 2},
        "train.steps": 40,
        "checkpoint.every": 20,
        "checkpoint.keep": 9,
        "cluster.heartbeat": 0.1,
        "cluster.lost_after": 1.2,
        "cluster.replacements": 3,
    }
    calm = run_job(MLP, changes)
    true = os.fsync

    def slow(descriptor: int) -> None:
        time.sleep(SECONDS)
        true(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    run = run_job(SLOW, changes)
    monkeypatch.undo()
    summary = run.summary
    assert (summary["status"], summary["steps"], summary["attempt"]) == ("done", 40, 1)
    assert summary["failures"] == []
    assert summary["membership"]["replacements"] == []
    assert summary["warnings"] == []
    assert losses(run) == losses(calm)
    assert len(checkpoint.generations(run.checkpoints)) == 2
    for path in checkpoint.generations(run.checkpoints):
        checkpoint.verify(path)
    told = [line.split() for line in (run.path.parent / "syncs").read_text().splitlines()]
    assert {thread for _, thread, _ in told} == {"checkpoint"}  # no sync in the thread that trains
    assert {still for *_, still in told} == {"0"}  # one at a time
    assert max(int(steps) for steps, *_ in told) > 3  # steps went on meanwhile
