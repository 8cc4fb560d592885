"""Tables that are declared sparse, under every mesh: the numbers of dense ones."""

from __future__ import annotations

import numpy as np
import pytest

from conftest import losses
from parallel.test_same_numbers import RunJob
from verbund.job import parse_strategy
from verbund.stage import launch

TASK = """
import torch
from torch import nn
from verbund import Table

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(40, 8, sparse=SPARSE, padding_idx=3)
        self.bag = nn.EmbeddingBag(40, 8, mode="mean", sparse=SPARSE)
        self.table = Table(50, 8, seed=2)
        self.tied = self.table
        self.head = nn.Linear(8, 5)
    def forward(self, ids):
        hidden = self.words(ids).sum(1) + self.bag(ids) + self.table(ids + 1).sum(1) * self.tied(ids[:, 0])
        return self.head(torch.tanh(hidden))

def model():
    return Model()

def tensor_plan():
    return {"words": "embedding"}

def inputs(batch):
    return batch["ids"]
"""
IDS = np.random.default_rng(3).integers(0, 40, (203, 4))
Y = np.random.default_rng(4).integers(0, 5, 203)
CHANGES = {
    "data.input": "ids",
    "data.validation_fraction": 0.2,
    "train.steps": 8,
    "train.micro_batch": 7,
    "train.optimizer": {"name": "adam", "lr": 0.02},
}
MESHES = ["data=1", "data=2", "data=3", "shard=2", "shard=3,zero=1", "data=2,shard=2", "tensor=2"]


@pytest.fixture
def train(run_job: RunJob):  # type: ignore[no-untyped-def]
    def run(sparse: bool, mesh: str):  # type: ignore[no-untyped-def]
        task = TASK.replace("SPARSE", str(sparse))
        return run_job(task, {**CHANGES, **parse_strategy(mesh)}, ids=IDS, y=Y)

    return run


def test_numbers_are_those_of_dense_tables(train) -> None:  # type: ignore[no-untyped-def]
    alone = losses(train(False, "data=1"))
    for mesh in MESHES:
        dense, sparse = train(False, mesh), train(True, mesh)
        assert losses(sparse) == losses(dense), mesh
        np.testing.assert_allclose(losses(sparse), alone, rtol=1e-5, err_msg=mesh)
        assert sparse.summary["metrics"]["loss"]["last"] == dense.summary["metrics"]["loss"]["last"], mesh
        note = "`words` and 1 more are declared sparse: without a parameter server the gradients are dense"
        assert any(note in text for text in sparse.summary["notes"]), mesh
        assert not any("sparse" in text for text in dense.summary["notes"]), mesh


ROWS = """
def rows(batch):
    ids = batch["ids"]
    return {"words": ids, "bag": ids, "table": torch.cat([ids + 1, ids[:, :1]], 1)}
"""
SERVED = [
    "islands=1,exchange=parameter_server",
    "islands=2,exchange=parameter_server",
    "islands=2,data=2,exchange=parameter_server,exchange.servers=2",
]


@pytest.mark.parametrize("rows", ["", ROWS], ids=["when they are used", "all at once"])
def test_tables_on_servers_have_the_numbers_of_a_single_process(rows: str, run_job: RunJob) -> None:
    task = TASK.replace("SPARSE", "True") + rows
    changes = {**CHANGES, "train.optimizer": {"name": "adagrad", "lr": 0.1}}
    alone = run_job(task, changes, ids=IDS, y=Y)
    for strategy in SERVED:
        served = run_job(task, {**changes, **parse_strategy(strategy)}, ids=IDS, y=Y)
        np.testing.assert_allclose(losses(served), losses(alone), rtol=1e-5, err_msg=strategy)
        ours, theirs = (run.summary["metrics"]["loss"]["last"] for run in (served, alone))
        assert ours == pytest.approx(theirs, rel=1e-5)
        assert not any("sparse" in text for text in served.summary["notes"])
    # What servers have saved any strategy goes on from.
    longer = run_job(task, {**changes, "train.steps": 12}, ids=IDS, y=Y)
    resumed = launch.resume(served.path, {**parse_strategy("shard=2"), "train.steps": 12})
    np.testing.assert_allclose(losses(resumed), losses(longer), rtol=1e-5)
