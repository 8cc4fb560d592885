"""Mirrors outlive their worker, and what counts as whole is right, whenever that was killed."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from comm import members
from verbund.comm.collectives import Group
from verbund.comm.peer_lost import PeerLost
from verbund.comm.shared_memory import arena, identity
from verbund.comm.shared_memory.arena import Lives
from verbund.comm.shared_memory.identity import Unavailable
from verbund.mesh.axes import Mesh
from verbund.mesh.groups import Groups
from verbund.mesh.state import Tensors
from verbund.stage.mirror_transfer import keepers
from verbund.stage.mirrors import Mirrors, unpacked

EVERY = 3


def trained(rank: int, step: int, count: int = 300_000) -> Tensors:
    """As a worker has it after so many steps: a moment, a number, and nothing of one tensor."""
    tensors: Tensors = {
        ("parameters", "a"): torch.arange(count, dtype=torch.float32).view(-1, 100).mul_(step + 1).add_(rank).t(),
        ("buffers", "mean"): torch.full((5,), float(step), dtype=torch.float64),
        ("parameters", "none"): torch.empty(0, 4),
    }
    if step >= EVERY * 2:  # states come later
        tensors["optimizer", "a/exp_avg"] = torch.full((count,), step, dtype=torch.bfloat16)
        tensors["optimizer", "a/step"] = torch.tensor(float(step))
    return tensors


def same(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(
        one[key].dtype == other[key].dtype and torch.equal(one[key], other[key]) for key in one
    )


def mirrored(group: Group, tell: Any) -> list[int]:
    """Worker 1 mirrors on and on; the other looks at what is there once that has ended. Steps that were whole."""
    assert group._host is not None
    mirrors = Mirrors(EVERY, tell)
    mirrors.meet(Groups.of(Mesh(group.rank, shard=2), group), group.rank)
    tell(os.getpid())
    step = 0
    while group.rank == 1:
        step += 1
        if mirrors.due(step):
            mirrors.take(step, {"samples": step * 7}, trained(1, step))
    lives = Lives(group._host._neighbours)
    while not lives.ended():
        time.sleep(0.002)
    steps = mirrors.steps()[1]
    for step in steps:
        state, tensors = unpacked(mirrors.read(1, step))
        assert state == {"samples": step * 7}
        assert same(tensors, trained(1, step)), step
    with pytest.raises(KeyError, match="no mirror of step 1"):
        mirrors.read(1, 1)
    return steps


def test_whenever_it_is_killed_one_is_whole(tmp_path: Path) -> None:
    draw = random.Random(3)
    counts = set()
    for _ in range(2):
        all_ = members.start(tmp_path, 2, mirrored)
        try:
            killed = [member.result() for member in all_][1]
            time.sleep(0.3 + draw.random() * 0.05)
            os.kill(killed, signal.SIGKILL)
            steps = all_[0].result(10.0)
            assert steps
            assert all(step % EVERY == 0 for step in steps)
            assert len(steps) == 1 or steps[1] - steps[0] == EVERY
            counts.add(len(steps))
        finally:
            for member in all_:
                member.process.kill()
                member.process.join()
    assert counts <= {1, 2}


def over_hosts(group: Group, tell: Any) -> dict[int, list[int]]:
    """All mirror and agree as in a training, until one is lost; what those that are left can read then."""
    groups = Groups.of(Mesh(group.rank, shard=3), group)
    mirrors = Mirrors(EVERY, tell)
    mirrors.meet(groups, group.rank)
    tell(os.getpid())
    step = 0
    try:
        while True:
            mirrors.finish(step + 1)
            groups.agree("the agreement")
            step += 1
            if mirrors.due(step):
                mirrors.take(step, {"samples": step * 7}, trained(group.rank, step))
    except PeerLost:
        groups.leave()
    found = mirrors.steps()
    for owner, steps in found.items():
        for each in steps:
            state, tensors = unpacked(mirrors.read(owner, each))
            assert state == {"samples": each * 7}
            assert same(tensors, trained(owner, each)), (owner, each)
    return found


def test_who_is_alone_on_its_host_has_them_on_another(tmp_path: Path) -> None:
    draw = random.Random(5)
    for lost in (2, 0):
        all_ = members.start(tmp_path, 3, over_hosts, hosts=["a", "a", "b"], timeout=60.0)
        try:
            started = [member.result() for member in all_]
            time.sleep(0.4 + draw.random() * 0.05)
            os.kill(started[lost], signal.SIGKILL)
            left = [all_[rank].result(10.0) for rank in range(3) if rank != lost]
            common = [set().union(*(found.get(owner, []) for found in left)) for owner in range(3)]
            assert common[0] & common[1] & common[2], left
        finally:
            for member in all_:
                member.process.kill()
                member.process.join()


@pytest.mark.parametrize(
    ("hosts", "found"),
    [("aa", {}), ("ab", {0: 1, 1: 0}), ("aab", {2: 0}), ("abb", {0: 1}), ("abc", {0: 1, 1: 2, 2: 0}), ("a", {})],
)
def test_who_keeps_whose(hosts: str, found: dict[int, int]) -> None:
    assert keepers(hosts) == found


def alone(note: Any) -> Mirrors:
    mirrors = Mirrors(EVERY, note)
    mirrors.meet(Groups.alone(torch.device("cpu")), 0)
    return mirrors


def test_all_go_back_to_a_step(one_thread: None) -> None:
    """The one that all go back to is never written over, whatever had come after it."""
    mirrors = alone(pytest.fail)
    for step in (6, 9, 12):
        mirrors.take(step, {}, trained(0, step, 1000))
    mirrors.finish()
    assert mirrors.steps() == {0: [9, 12]}
    mirrors.back_to(9)
    assert mirrors.steps() == {0: [9]}
    mirrors.take(12, {"again": True}, trained(0, 12, 1000))
    mirrors.finish()
    assert mirrors.steps() == {0: [9, 12]}
    assert unpacked(mirrors.read(0, 12))[0] == {"again": True}
    assert same(unpacked(mirrors.read(0, 9))[1], trained(0, 9, 1000))


def test_no_mirrors_are_told_and_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> str:
        raise Unavailable("a processor of the kind z80 may reorder what is written")

    monkeypatch.setattr(identity, "host", refused)
    notes: list[str] = []
    mirrors = alone(notes.append)
    mirrors.take(EVERY, {}, trained(0, EVERY, 100))
    mirrors.finish()
    assert mirrors.steps() == {}
    assert "no mirrors: a processor of the kind z80" in notes[0]


def test_no_room_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    mirrors = alone(notes.append)
    monkeypatch.setattr(arena, "available_bytes", lambda: 1000)
    mirrors.take(EVERY, {}, trained(0, EVERY, 10_000))
    mirrors.finish()
    assert mirrors.steps() == {}
    assert "MiB are not free" in notes[0]
