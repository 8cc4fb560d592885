"""Clipping where servers hold tables: the norm is that of all gradients, of rows too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from conftest import losses
from trained import parameters
from verbund.errors import JobError
from verbund.job import Job
from verbund.run import Run

TASK = """
import torch
from torch import nn
from verbund import Table

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = Table(300, 8, seed=2)
        self.words = nn.Embedding(300, 4, sparse=True)
        self.head = nn.Linear(12, 5)
    def forward(self, ids):
        return self.head(torch.cat([self.table(ids), self.words(ids)], 1))

def model():
    torch.manual_seed(1)
    return Model()

def inputs(batch):
    return batch["ids"]
"""
CHANGES: dict[str, Any] = {
    "data.input": "ids",
    "train.steps": 6,
    "train.global_batch": 24,
    "train.clip_norm": 0.1,
    "train.optimizer": {"name": "sgd", "lr": 1.0},
}
RunJob = Callable[..., Run]


@pytest.mark.parametrize("consistency", ["bulk_synchronous", "bounded_staleness", "asynchronous"])
@pytest.mark.parametrize("mesh", [{}, {"data": 2}])
def test_one_island_clips_as_a_single_process_does(consistency: str, mesh: dict[str, int], run_job: RunJob) -> None:
    random = np.random.default_rng(4)
    data = {"ids": random.integers(0, 300, 144), "y": random.integers(0, 5, 144)}
    exchange = {"name": "parameter_server", "log": False, "consistency": consistency}
    alone = run_job(TASK, CHANGES, **data)
    unclipped = run_job(TASK, {**CHANGES, "train.clip_norm": None}, **data)
    run = run_job(TASK, {**CHANGES, "strategy.mesh": mesh, "strategy.exchange": exchange}, **data)
    torch.testing.assert_close(losses(run), losses(alone), rtol=1e-5, atol=1e-6)
    ours, theirs, others = parameters(run), parameters(alone), parameters(unclipped)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(others[name], value, rtol=1e-3, atol=1e-4), "nothing was clipped"


def test_shares_that_are_added_up_are_not_clipped(make_job: Callable[..., Job]) -> None:
    changes = {"train.clip_norm": 1.0, "strategy.islands": 2, "strategy.exchange": {"name": "parameter_server"}}
    with pytest.raises(JobError, match="each is clipped by itself then"):
        make_job(changes=changes)
    changes["strategy.exchange"] = {"name": "parameter_server", "consistency": "bounded_staleness"}
    make_job(changes=changes)
