"""The axis `shard` with models whose parameters are odd, or used in odd places."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from conftest import MakeJob, losses
from verbund.cluster.local import LocalCluster
from verbund.job import parse_strategy
from verbund.run import Run
from verbund.stage import launch
from verbund.stage.verify import verify

EMPTY = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(12, 12)
        self.none = nn.Parameter(torch.zeros(0, 3))
        self.thin = nn.Parameter(torch.zeros(3, 0))
    def forward(self, x):
        return torch.tanh(self.layer(x)) + self.none.sum() + self.thin.sum()

def model():
    return nn.Sequential(Block(), Block(), nn.Linear(12, 5))
"""
ADAM = {"train.optimizer": {"name": "adam", "lr": 0.01}}


@pytest.mark.parametrize("mesh", ["shard=2", "shard=2,data=2", "shard=2,pipeline=2"])
def test_parameters_without_elements_are_saved(mesh: str, run_job: Callable[..., Run]) -> None:
    expected = losses(run_job(EMPTY, ADAM))
    run = run_job(EMPTY, {**ADAM, **parse_strategy(mesh), "train.steps": 2})
    run = launch.resume(run.path, {**parse_strategy("shard=3"), "train.steps": 5})
    assert losses(run) == pytest.approx(expected, rel=1e-5)
    assert losses(launch.resume(run.path, {**parse_strategy("data=1"), "train.steps": 6}))


ELSEWHERE = """
import torch
from torch import nn
from torch.nn import functional as F

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.head = nn.Linear(12, 5)
    def forward(self, x):
        first = x * self.blocks[2].bias
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(F.linear(x, self.blocks[0].weight.t()) + first)

def model():
    return Model()
"""


@pytest.mark.parametrize("mesh", ["shard=2", "shard=2,zero=2", "shard=2,data=2,zero=1"])
def test_a_weight_that_is_used_outside_of_its_block(mesh: str, shared_cluster: LocalCluster, make_job: MakeJob) -> None:
    changes = {**parse_strategy(mesh), "train.micro_batch": 10, "data.validation_fraction": 0.2}
    assert verify(make_job(ELSEWHERE, changes), steps=2)["passed"]
    launch.train(make_job(ELSEWHERE, changes))
