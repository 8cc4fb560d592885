"""Failures of one part of a divided model: the first cause ends all, quickly."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from verbund.errors import ClusterLost, RunFailed
from verbund.job import parse_strategy
from verbund.run import Run

TASK = """
import os, signal
from pathlib import Path
import torch
from torch import nn
from torch.nn import functional as F

RUN = Path(__file__).parent / "run-1"
CALLS = []

class Block(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.number, self.a = number, nn.Linear(12, 12)
    def forward(self, x):
        fails("block", self.number)
        return torch.tanh(self.a(x))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(n) for n in range(4))
        self.head = nn.Linear(12, 5)
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def model():
    return Model()

def loss(output, targets):
    fails("loss", 0)
    return F.cross_entropy(output, targets, reduction="none")

def fails(where, number):
    if not RUN.exists() or not torch.is_grad_enabled():
        return
    CALLS.append((where, number))
    if CALLS.count((where, number)) > 12 and (where, number) == WHERE:
        ACTION
"""


def task(where: tuple[str, int], action: str) -> str:
    return TASK.replace("WHERE", repr(where)).replace("ACTION", action)


@pytest.mark.parametrize("mesh", ["pipeline=2", "pipeline=2,data=2", "tensor=2", "shard=2"])
@pytest.mark.parametrize("where", [("loss", 0), ("block", 0), ("block", 3)])
def test_an_exception_in_one_part(where: tuple[str, int], mesh: str, run_job: Callable[..., Run]) -> None:
    plan = "\ndef tensor_plan():\n    return {'head': 'column+gather'}\n"
    changes: dict[str, Any] = {**parse_strategy(mesh), "train.steps": 100_000, "train.objective": None}
    start = time.monotonic()
    with pytest.raises(RunFailed, match="ValueError: the sun is down"):
        run_job(task(where, 'raise ValueError("the sun is down")') + plan, changes)
    assert time.monotonic() - start < 30


@pytest.mark.parametrize("mesh", ["pipeline=2", "shard=2,pipeline=2"])
def test_a_killed_stage(mesh: str, run_job: Callable[..., Run]) -> None:
    changes: dict[str, Any] = {**parse_strategy(mesh), "train.steps": 100_000, "train.objective": None}
    start = time.monotonic()
    with pytest.raises(ClusterLost, match="was killed by SIGKILL"):
        run_job(task(("block", 3), "os.kill(os.getpid(), signal.SIGKILL)"), changes)
    assert time.monotonic() - start < 30
