"""Pipelines of models whose layers do more than hand one value on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from conftest import MakeJob, losses
from verbund.cluster.local import LocalCluster
from verbund.errors import InputError
from verbund.job import parse_strategy
from verbund.run import Run
from verbund.stage import launch
from verbund.stage.verify import verify

HEAD = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(6))
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        return self.head(self.through(x))

def model():
    return Model()
"""


def through(body: str) -> str:
    """A task whose model's blocks are used so."""
    return f"{HEAD}\ndef through(self, x):\n{body}\nModel.through = through\n"


SKIPPED = through("""
    first = self.blocks[0](x)
    x = self.blocks[1](first)
    x = self.blocks[2](x)
    x = self.blocks[3](x) + first
    return self.blocks[5](self.blocks[4](x))
""")
RING = through("""
    first = self.blocks[0](x)
    x = first
    for block in self.blocks[1:]:
        x = block(x)
    return x + first
""")


@pytest.mark.parametrize("mesh", ["pipeline=2", "pipeline=3,schedule=gpipe", "pipeline=2,shard=2"])
def test_a_value_that_skips_layers_moves_the_cut(mesh: str, shared_cluster: LocalCluster, make_job: MakeJob) -> None:
    assert verify(make_job(SKIPPED, parse_strategy(mesh)), steps=2)["passed"]


def test_every_start_cuts_a_model_in_the_same_way(shared_cluster: LocalCluster, make_job: MakeJob) -> None:
    first, second = (launch.check(make_job(SKIPPED, parse_strategy("pipeline=2"))) for _ in range(2))
    assert first.costs == second.costs is not None
    assert first.notes == second.notes


def test_where_nothing_can_be_cut_the_value_and_its_use_are_named(
    shared_cluster: LocalCluster, make_job: MakeJob
) -> None:
    with pytest.raises(InputError) as caught:
        launch.check(make_job(RING, parse_strategy("pipeline=3")))
    message = str(caught.value)
    assert caught.value.exit_status == 2
    assert "can be cut into 2 parts, and 3 stages are wanted (3 workers, 1 each)" in message
    assert "not before `blocks.2`, as a value [37, 12] of `blocks.0` is used by `add` in `blocks.5`" in message
    line = RING.splitlines().index("    return x + first") + 1
    assert f"task.py:{line} but is no argument of `blocks.2`" in message
    assert "pipeline_plan()" in message


def test_a_plan_in_another_order_than_the_calls(shared_cluster: LocalCluster, make_job: MakeJob) -> None:
    task = SKIPPED + "\ndef pipeline_plan():\n    return ['blocks.0', 'blocks.5', 'blocks.4']\n"
    with pytest.raises(InputError, match=r"`blocks.5` is called after .* order of their calls: blocks.0, blocks.4"):
        launch.check(make_job(task, parse_strategy("pipeline=2")))


def test_fewer_places_than_stages(shared_cluster: LocalCluster, make_job: MakeJob) -> None:
    changes = parse_strategy("pipeline=3,schedule=interleaved,chunks=4")
    with pytest.raises(InputError, match=r"has 6 layers .* 12 stages are wanted \(3 workers, 4 each\).*fewer `strat"):
        launch.check(make_job(SKIPPED, changes))


IN_PLACE = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(12, 12)
    def forward(self, x):
        x.mul_(0.5)
        return torch.tanh(self.layer(x))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(12, 5)
    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x + 0)
        return self.head(x)

def model():
    return Model()
"""
SHARED_DROPOUT = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.layer, self.dropout = nn.Linear(12, 12), dropout
    def forward(self, x):
        return x + self.dropout(torch.tanh(self.dropout(self.layer(x))))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        dropout = nn.Dropout(0.4)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(4))
        self.head = nn.Linear(12, 5)
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def model():
    return Model()
"""


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble", "interleaved"])
@pytest.mark.parametrize("task", [IN_PLACE, SHARED_DROPOUT], ids=["in place", "shared dropout"])
def test_equals_a_single_process(task: str, schedule: str, shared_cluster: LocalCluster, make_job: MakeJob) -> None:
    changes: dict[str, Any] = {**parse_strategy(f"pipeline=2,schedule={schedule}"), "train.micro_batch": 10}
    found = verify(make_job(task, changes), steps=2)
    assert found["passed"], (found["differences"], found["missing"])


FROZEN = SHARED_DROPOUT.replace(
    "    return Model()", "    m = Model()\n    m.blocks[:3].requires_grad_(False)\n    return m"
)


ADAM = {"train.clip_norm": 1.0, "train.ema": 0.9, "train.optimizer": {"name": "adam", "lr": 0.01}}


@pytest.mark.parametrize("mesh", ["pipeline=2", "pipeline=2,shard=2", "pipeline=3,schedule=zero_bubble"])
def test_a_stage_without_trained_parameters(mesh: str, run_job: Callable[..., Run]) -> None:
    expected = losses(run_job(FROZEN, ADAM))
    assert losses(run_job(FROZEN, {**ADAM, **parse_strategy(mesh)})) == pytest.approx(expected, rel=1e-5)


def test_a_stage_without_trained_parameters_resumes(run_job: Callable[..., Run]) -> None:
    expected = losses(run_job(FROZEN, ADAM))
    run = run_job(FROZEN, {**ADAM, **parse_strategy("pipeline=2,data=2"), "train.steps": 2})
    run = launch.resume(run.path, {**parse_strategy("pipeline=3"), "train.steps": 5})
    assert losses(run) == pytest.approx(expected, rel=1e-5)


def test_a_stage_without_parameters(run_job: Callable[..., Run]) -> None:
    task = (
        SHARED_DROPOUT
        + """
def model():
    return nn.Sequential(nn.Tanh(), nn.Tanh(), nn.Linear(12, 5))

def pipeline_plan():
    return ["0", "2"]
"""
    )
    expected = losses(run_job(task, ADAM))
    for mesh in ("pipeline=2", "pipeline=2,shard=2"):
        assert losses(run_job(task, {**ADAM, **parse_strategy(mesh)})) == pytest.approx(expected, rel=1e-5)
