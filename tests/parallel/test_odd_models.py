"""Models that do what models do, under the meshes that have trouble with it."""

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
from torch.nn import functional as F

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(12, 5)
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def model():
    return Model()
"""
BLOCKS = {
    "unused parameters": """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.unused = nn.Linear(12, 12), nn.Parameter(torch.ones(3))
    def forward(self, x):
        return torch.tanh(self.a(x))
""",
    "frozen beside trained": """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen, self.a, self.b = nn.Linear(12, 12), nn.Linear(12, 2), nn.Linear(2, 12)
        self.frozen.requires_grad_(False)
    def forward(self, x):
        return torch.tanh(self.frozen(x) + self.b(self.a(x)))
""",
    "batch statistics": """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm = nn.Linear(12, 12), nn.BatchNorm1d(12)
    def forward(self, x):
        return torch.tanh(self.norm(self.a(x)))
""",
    "a number as a parameter": """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.scale = nn.Linear(12, 12), nn.Parameter(torch.tensor(0.7))
    def forward(self, x):
        return torch.tanh(self.a(x)) * self.scale
""",
    "a learnt mask": """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.bias = nn.Parameter(torch.zeros(3, 3))
    def forward(self, x):
        y = x.view(-1, 3, 4)
        return x + self.attention(y, y, y, attn_mask=self.bias, need_weights=False)[0].reshape(-1, 12)
""",
    "a module of two names": """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.plain = nn.Linear(12, 12), nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 12))
        self.again = self.a
    def forward(self, x):
        return self.plain(torch.tanh(self.a(x))) + self.again(x)
""",
    "a sequence with a forward of its own": """
class Normed(nn.Sequential):
    def forward(self, x):
        for part in self:
            x = F.normalize(part(x), dim=-1)
        return x
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = Normed(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 12))
        self.plain = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 12))
    def forward(self, x):
        return self.plain(x) + self.parts(x)
""",
}
TIED = """
from torch import nn

def model():
    layers = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 5))
    layers[2].weight = layers[0].weight
    return layers
"""


@pytest.mark.parametrize(
    ("block", "mesh", "changes"),
    [
        ("unused parameters", "shard=2,zero=1", {"train.micro_batch": 2, "train.global_batch": 8}),
        ("unused parameters", "shard=2,zero=3", {"train.micro_batch": 2}),
        ("frozen beside trained", "shard=2", {}),
        ("frozen beside trained", "shard=2,pipeline=2", {}),
        ("batch statistics", "pipeline=2", {"train.group": 5}),
        ("batch statistics", "pipeline=2,data=2,schedule=gpipe", {"train.group": 5}),
        ("batch statistics", "shard=2", {"train.group": 4, "train.global_batch": 12}),
        ("batch statistics", "shard=3,pipeline=2", {"train.group": 5}),
        ("a number as a parameter", "shard=2,pipeline=2", {}),
        ("a learnt mask", "tensor=2", {}),
        ("a module of two names", "tensor=2", {}),
        ("a module of two names", "pipeline=2", {}),
        ("a sequence with a forward of its own", "tensor=2", {}),
    ],
)
def test_equals_a_single_process(
    block: str, mesh: str, changes: dict[str, Any], shared_cluster: LocalCluster, make_job: MakeJob
) -> None:
    found = verify(make_job(HEAD + BLOCKS[block], {**parse_strategy(mesh), **changes}), steps=2)
    assert found["passed"], (found["differences"], found["missing"])
    assert "float64" not in found


@pytest.mark.parametrize("mesh", ["shard=2", "shard=3,zero=1", "pipeline=2"])
def test_tied_layers(mesh: str, shared_cluster: LocalCluster, make_job: MakeJob) -> None:
    assert verify(make_job(TIED, parse_strategy(mesh)), steps=2)["passed"]


def test_a_number_as_a_parameter_resumes(run_job: Callable[..., Run]) -> None:
    task = HEAD + BLOCKS["a number as a parameter"]
    adam = {"train.optimizer": {"name": "adam", "lr": 0.01}}
    expected = losses(run_job(task, {**adam, "train.steps": 4}))
    run = run_job(task, {**adam, **parse_strategy("shard=2"), "train.steps": 2})
    run = launch.resume(run.path, {**parse_strategy("shard=3"), "train.steps": 4})
    assert losses(run) == pytest.approx(expected, rel=1e-5)


def test_a_row_with_a_forward_of_its_own_is_refused(shared_cluster: LocalCluster, make_job: MakeJob) -> None:
    task = """
from torch import nn

class Half(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 0.5

def model():
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), Half(16, 5))

def tensor_plan():
    return {"0": "column", "2": "row"}
"""
    with pytest.raises(InputError, match=r"`2` has a forward of its own"):
        launch.check(make_job(task, parse_strategy("tensor=2")))


def test_weights_that_a_hook_recomputes_are_refused(shared_cluster: LocalCluster, make_job: MakeJob) -> None:
    task = """
from torch import nn

def model():
    return nn.Sequential(nn.utils.weight_norm(nn.Linear(12, 16)), nn.ReLU(), nn.Linear(16, 5))
"""
    with pytest.raises(InputError, match="`0` recomputes its weight in a hook"):
        launch.check(make_job(task, parse_strategy("shard=2")))
