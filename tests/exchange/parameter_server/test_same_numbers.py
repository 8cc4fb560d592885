"""Synchronous parameter servers give the numbers of a single process, whatever the mesh of each island."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from conftest import losses
from trained import newest, parameters
from verbund.run import Run

RunJob = Callable[..., Run]

# A layer that is frozen, and a parameter that nobody uses. Without the biases of keys: their true gradient is zero, so
# that Adam would turn rounding into steps.
TRANSFORMER = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 16)
        self.embed.weight.requires_grad_(False)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True, bias=False)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 5)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.head(self.encoder(self.embed(x.view(-1, 3, 4))).mean(1))

def model():
    return Model()
"""
MLP = """
from torch import nn

def model():
    made = nn.Sequential(
        nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 5)
    )
    made[2].weight.requires_grad_(False)
    return made
"""
BATCH_NORM = """
from torch import nn

def model():
    return nn.Sequential(nn.Linear(12, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 5))
"""
ADAMW = {"name": "adamw", "lr": 1e-3, "weight_decay": 0.1, "groups": [{"match": "*.bias", "weight_decay": 0.0}]}
SGD = {"name": "sgd", "lr": 0.05, "momentum": 0.9, "groups": [{"match": "*.bias", "lr": 0.1}]}
SCHEDULE = {"name": "cosine", "warmup": 2}


def alike(run_job: RunJob, task: str, strategy: dict[str, Any], changes: dict[str, Any]) -> Run:
    """Trains both ways and compares; gives the run with servers."""
    changes = {"train.steps": 6, "train.global_batch": 24, "train.schedule": SCHEDULE, **changes}
    alone = run_job(task, changes)
    served = {f"strategy.{key}": value for key, value in strategy.items()}
    exchange = {"name": "parameter_server", "servers": 2, "block_bytes": 1024}
    run = run_job(task, {**changes, "strategy.islands": 2, "strategy.exchange": exchange, **served})
    torch.testing.assert_close(losses(run), losses(alone), rtol=1e-5, atol=1e-6)
    ours, theirs = parameters(run), parameters(alone)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    with newest(run) as saved, newest(alone) as single:
        for kind in ("buffers", "optimizer"):
            for name in single.names(kind):
                value = single.read(kind, name)
                torch.testing.assert_close(
                    saved.read(kind, name), value, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
                )
            # Of a tensor that no gradient has reached, but that several servers have, the first state is saved.
            for name in set(saved.names(kind)) - set(single.names(kind)):
                assert not saved.read(kind, name).any(), name
    return run


@pytest.mark.parametrize(
    ("task", "optimizer", "mesh", "more"),
    [
        (TRANSFORMER, ADAMW, {"data": 2}, {}),
        (TRANSFORMER, SGD, {"shard": 2}, {"zero": 1}),
        (MLP, ADAMW, {"shard": 2}, {"zero": 2}),
        (TRANSFORMER, ADAMW, {"shard": 2}, {"zero": 3}),
        (TRANSFORMER, ADAMW, {"tensor": 2}, {}),
        (MLP, SGD, {"tensor": 2}, {}),
        (TRANSFORMER, ADAMW, {"pipeline": 2}, {}),
        (MLP, SGD, {"pipeline": 2}, {"schedule": "zero_bubble"}),
    ],
)
def test_islands_of_two(
    task: str, optimizer: dict[str, Any], mesh: dict[str, int], more: dict[str, Any], run_job: RunJob
) -> None:
    alike(run_job, task, {"mesh": mesh, **more}, {"train.optimizer": optimizer})


@pytest.mark.parametrize("mesh", [{}, {"data": 2}])
def test_running_statistics(mesh: dict[str, int], run_job: RunJob) -> None:
    alike(run_job, BATCH_NORM, {"mesh": mesh}, {"train.optimizer": SGD, "train.group": 6})
