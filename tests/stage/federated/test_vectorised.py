"""Clients as one batched computation give the numbers of clients that take turns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from federation import federation
from verbund.exchange.federated.partition import Parts
from verbund.stage.federated import vectorised
from verbund.stage.federated.clients import Resident
from verbund.stage.federated.local import LocalTraining
from verbund.stage.federated.vectorised import NotVectorisable, Vectorised, clients_of

pytestmark = pytest.mark.usefixtures("one_thread")

MLP = """
from torch import nn

def model():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 4))
"""
SGD = {"name": "sgd", "lr": 0.1}


def columns(rows: int = 150) -> dict[str, np.ndarray[Any, Any]]:
    random = np.random.default_rng(3)
    return {"x": random.normal(size=(rows, 6)).astype(np.float32), "y": random.integers(0, 4, rows)}


@pytest.mark.parametrize(
    ("exchange", "train"),
    [
        ({}, {}),
        ({"local_epochs": 3}, {"optimizer": {**SGD, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}}),
        ({"local_steps": 7}, {"optimizer": {**SGD, "momentum": 0.5, "dampening": 0.2}, "clip_norm": 0.3}),
        ({}, {"optimizer": {**SGD, "groups": [{"match": "*.bias", "scale_lr": 0.1}]}, "schedule": "cosine"}),
        ({"rule": {"name": "fedprox", "proximal": 0.5}, "local_epochs": 2}, {}),
        ({"rule": "scaffold", "local_epochs": 2}, {}),
        ({"rule": "fednova", "local_epochs": 2}, {"optimizer": {**SGD, "momentum": 0.9}}),
        ({"rule": {"name": "ditto", "proximal": 0.3}, "local_epochs": 2}, {}),
        ({"rule": {"name": "fedper", "personal": ["5.*"]}, "local_epochs": 2}, {}),
        ({"rule": "fedbn", "local_epochs": 2}, {}),
    ],
    ids=lambda value: str(value.get("rule", "")) if isinstance(value, dict) else "",
)
def test_same_numbers_as_in_turns(exchange: dict[str, Any], train: dict[str, Any], tmp_path: Path) -> None:
    """Also with clients of very different size, few at a time, and in several rounds, so that what they keep counts."""
    exchange = {"clients": 9, "cohort": 6, "partition": {"name": "power", "alpha": 1.2}, **exchange}
    train = {"global_batch": 8, **train}
    one = federation(tmp_path, MLP, exchange, train, Resident, **columns())
    other = federation(tmp_path, MLP, exchange, train, Vectorised, **columns())
    assert isinstance(other.rounds._clients, Vectorised)
    other.rounds._clients._client_bytes = vectorised._STACK_BYTES // 4  # chunks of four clients
    assert one.parts.sizes.max() > 5 * one.parts.sizes.min()
    for a, b in zip(one.play(4), other.play(4), strict=True):
        assert a.cohort == b.cohort
        assert a.loss == pytest.approx(b.loss, rel=1e-5)
        assert a.weight == b.weight
        assert a.steps == b.steps
    for name, values in one.server.parameters.items():
        torch.testing.assert_close(values, other.server.parameters[name], rtol=1e-5, atol=1e-5)
    assert one.server.memories.keys() == other.server.memories.keys()
    for client, memory in one.server.memories.items():
        assert memory.keys() == other.server.memories[client].keys()
        for name, values in memory.items():
            torch.testing.assert_close(values, other.server.memories[client][name], rtol=1e-5, atol=1e-5)


def test_samples_without_weight_take_no_step(tmp_path: Path) -> None:
    """A client whose targets are all ignored stays where it is, as in turns, momentum and all."""
    data = columns()
    data["y"][:90] = -100
    how: dict[str, Any] = {"clients": 3, "partition": {"name": "column", "column": "who"}, "local_epochs": 2}
    data["who"] = np.repeat(np.arange(3), 50)
    train = {"global_batch": 20, "optimizer": {**SGD, "momentum": 0.9}}
    one = federation(tmp_path, MLP, how, train, Resident, **data)
    other = federation(tmp_path, MLP, how, train, Vectorised, **data)
    one.play(2)
    other.play(2)
    for name, values in one.server.parameters.items():
        torch.testing.assert_close(values, other.server.parameters[name], rtol=1e-5, atol=1e-5)


DROPOUT = MLP.replace("nn.Tanh()", "nn.Dropout(0.5)")
BATCH_NORM = MLP.replace("nn.LayerNorm(8)", "nn.BatchNorm1d(8)")
BRANCH = """
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x):
        return self.a(x) if float(self.a.weight.detach().sum()) > 1e9 else self.b(x)

model = Model
"""
COUPLED = """
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 4)

    def forward(self, x):
        return self.a(x - x.mean(0))

model = Model
"""


@pytest.mark.parametrize(
    ("task", "train", "reason"),
    [
        (DROPOUT, {}, "torch.func.vmap"),
        (BATCH_NORM, {}, "buffers that training changes"),
        (BRANCH, {}, "torch.func.vmap"),
        (COUPLED, {}, "would differ"),
        (MLP, {"optimizer": {"name": "adamw"}}, "`adamw`, not `sgd`"),
        (MLP, {"precision": "bf16"}, "`bf16`"),
    ],
    ids=["dropout", "batch norm", "branch", "coupled", "adamw", "bf16"],
)
def test_what_cannot_be_one_computation_takes_turns(
    task: str, train: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    notes: list[str] = []

    def chosen(local: LocalTraining, parts: Parts) -> Resident | Vectorised:
        return clients_of(local, parts, notes.append)

    made: Callable[..., Any] = federation
    found = made(tmp_path, task, {"clients": 7}, {"global_batch": 8, **train}, chosen, **columns())
    assert isinstance(found.rounds._clients, Resident)
    assert reason in notes[0]
    assert found.play(2)[-1].loss > 0


def test_parameters_that_the_loss_does_not_use_stay(tmp_path: Path) -> None:
    """Weight decay or not: torch's optimisers pass over what has no gradient."""
    task = BRANCH.replace("float(self.a.weight.detach().sum()) > 1e9", "False")
    train = {"optimizer": {**SGD, "weight_decay": 0.1, "momentum": 0.9}, "global_batch": 8}
    one, other = (
        federation(tmp_path, task, {"clients": 5}, train, kind, **columns()) for kind in (Resident, Vectorised)
    )
    first = other.server.parameters["a.weight"].clone()
    one.play(2)
    other.play(2)
    assert torch.equal(other.server.parameters["a.weight"], first)
    for name, values in one.server.parameters.items():
        torch.testing.assert_close(values, other.server.parameters[name], rtol=1e-5, atol=1e-5)


def test_trying_out_leaves_no_trace(tmp_path: Path) -> None:
    exchange = {"clients": 5, "rule": {"name": "fedper", "personal": ["5.*"]}}
    found = federation(tmp_path, MLP, exchange, {"global_batch": 8}, Vectorised, **columns())
    assert isinstance(found.rounds._clients, Vectorised)
    before = {name: values.clone() for name, values in found.local.replica.model.state_dict().items()}
    found.rounds._clients.try_out()
    after = found.local.replica.model.state_dict()
    assert all(torch.equal(values, after[name]) for name, values in before.items())


def test_inputs_that_do_not_begin_with_the_batch_are_told(tmp_path: Path) -> None:
    task = MLP + "\ndef inputs(batch):\n    return batch['x'].float().T.contiguous()\n"
    task = task.replace("nn.Linear(6, 8)", "nn.Flatten()")
    found = federation(tmp_path, task, {"clients": 5}, {"global_batch": 8}, Vectorised, **columns())
    with pytest.raises(NotVectorisable, match="dimension 0 is not the batch"):
        found.play(1)
