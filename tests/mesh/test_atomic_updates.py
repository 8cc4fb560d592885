"""All agree upon an update: after a loss all that are left have taken it, or can, or nobody has."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from comm import members
from conftest import MakeJob
from verbund import task as tasks
from verbund.comm.collectives import Group
from verbund.comm.peer_lost import PeerLost
from verbund.data.loader import Batch
from verbund.mesh.axes import Mesh
from verbund.mesh.groups import Groups
from verbund.mesh.replica import Replica
from verbund.observe.events import Journal

TASK = """
from torch import nn
import lost

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Linear(16, 5)
    def forward(self, x):
        x = self.norm(self.first(x))
        lost.happens()
        return self.last(x)

def model():
    return Model()
"""
SETTINGS = {"train.optimizer": {"name": "adamw", "lr": 0.01}, "train.clip_norm": 0.5, "train.ema": 0.9}


@pytest.fixture
def loss(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Where `happens` is called in a forward pass, a test can have a peer lost."""
    (tmp_path / "lost.py").write_text("def happens(): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    import lost  # type: ignore[import-not-found]

    return lost


def made(make_job: MakeJob) -> Replica:
    job = make_job(TASK, SETTINGS)
    replica = Replica(tasks.load(job), job, Mesh(), Groups.alone(torch.device("cpu")))
    replica.optimizer_step.atomic = True
    return replica


def step(replica: Replica, number: int, journal: Journal) -> None:
    random = torch.Generator().manual_seed(number)
    columns = {"x": torch.randn(37, 12, generator=random), "y": torch.randint(0, 5, (37,), generator=random)}
    batches = iter([Batch(number, np.arange(37), columns)])
    sums = replica.gradients(batches, 1, number, [37], 0.0, journal)
    replica.update(number, [37], sums, None)


def broken(*_: Any) -> None:
    raise PeerLost("a worker is gone")


def equal(one: Replica, other: Replica) -> bool:
    mine, theirs = one.state.tensors(), other.state.tensors()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)


def test_a_step_that_was_broken_off_is_concluded_alone(
    make_job: MakeJob, tmp_path: Path, loss: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path / "journal", "worker", 0, 1)
    whole, left = made(make_job), made(make_job)
    for number in range(3):
        step(whole, number, journal)
        step(left, number, journal)
    step(whole, 3, journal)
    with monkeypatch.context() as patch:
        patch.setattr(Groups, "agree", broken)
        with pytest.raises(PeerLost):
            step(left, 3, journal)
    assert left.optimizer_step.ready
    assert not equal(whole, left)
    left.optimizer_step.undo()
    left.optimizer_step.conclude()
    left.optimizer_step.conclude()  # once more changes nothing
    assert not left.optimizer_step.ready
    assert equal(whole, left)


def test_a_step_that_was_broken_off_within_a_pass_changes_nothing(
    make_job: MakeJob, tmp_path: Path, loss: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Running statistics too, which the pass had changed already; and what is handed over is all there is."""
    journal = Journal(tmp_path / "journal", "worker", 0, 1)
    whole, left = made(make_job), made(make_job)
    for replica in (whole, left):
        step(replica, 0, journal)
    with monkeypatch.context() as patch:
        patch.setattr(loss, "happens", broken)
        with pytest.raises(PeerLost):
            step(left, 1, journal)
    assert not left.optimizer_step.ready
    assert not equal(whole, left)
    left.optimizer_step.undo()
    assert equal(whole, left)
    anew = made(make_job)
    anew.state.give({key: values.clone() for key, values in left.state.tensors().items()})
    for number in (1, 2):
        step(whole, number, journal)
        step(anew, number, journal)
    assert equal(whole, anew)


def agreeing(group: Group, tell: Any, sizes: dict[str, int]) -> tuple[int, int]:
    groups = Groups.of(Mesh(group.rank, **sizes), group)
    tell(os.getpid())
    entered = passed = 0
    try:
        while True:
            entered += 1
            groups.agree("the agreement")
            passed += 1
    except PeerLost:
        groups.leave()
        return entered, passed


@pytest.mark.parametrize(
    ("sizes", "hosts"), [({"shard": 2, "data": 2}, ["a", "a", "b", "b"]), ({"islands": 2, "tensor": 2}, None)]
)
def test_who_has_passed_knows_that_all_have_come(
    sizes: dict[str, int], hosts: list[str] | None, tmp_path: Path
) -> None:
    all_ = members.start(tmp_path, 4, agreeing, sizes, hosts=hosts, timeout=60.0)
    try:
        started = [member.result() for member in all_]
        time.sleep(0.2)
        os.kill(started[1], signal.SIGKILL)
        found = [all_[rank].result(10.0) for rank in (0, 2, 3)]
        assert max(passed for _, passed in found) <= min(entered for entered, _ in found)
        assert min(passed for _, passed in found) > 0
    finally:
        for member in all_:
            member.process.kill()
            member.process.join()
