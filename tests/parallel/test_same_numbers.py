"""The first law: a synchronous strategy's loss curve equals the single process's, however the work is divided.

The reference is a plain training loop written here, which shares nothing with the product but the order of the
samples; where the randomness is keyed by the sample, the reference is the product's own single process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from conftest import MLP, losses
from verbund.data.order import Order
from verbund.run import Run

STEPS = 50
FEW = 20  # more than three passes over the rows, and past every warm-up
ROWS = 203
GLOBAL_BATCH = 37

CONVNET = """
from torch import nn

def model():
    return nn.Sequential(
        nn.Unflatten(1, (1, 3, 4)), nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(72, 5)
    )
"""

TRANSFORMER = """
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout={dropout}, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        return self.head(self.encoder(self.embed(x.view(-1, 3, 4))).mean(1))

def model():
    return Model()
"""

TASKS = {"mlp": MLP, "convnet": CONVNET, "transformer": TRANSFORMER.format(dropout=0.0)}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"name": "sgd", "lr": 0.05, "momentum": 0.9},
    "adamw": {"name": "adamw", "lr": 1e-3, "weight_decay": 0.1},
}
RunJob = Callable[..., Run]


def build(task: str) -> nn.Module:
    namespace: dict[str, Any] = {}
    exec(task, namespace)  # noqa: S102 (the test's own text)
    torch.manual_seed(0)
    model: nn.Module = namespace["model"]()
    return model


def reference(task: str, optimizer: dict[str, Any]) -> list[float]:
    """The losses of a plain loop over `STEPS`: one process, whole batches, a mean loss."""
    random = np.random.default_rng(7)
    x = torch.from_numpy(random.normal(size=(ROWS, 12)).astype(np.float32))
    y = torch.from_numpy(random.integers(0, 5, ROWS))
    model = build(task)
    arguments = {key: value for key, value in optimizer.items() if key != "name"}
    kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[optimizer["name"]]
    stepper = kind(model.parameters(), **arguments)
    order = Order(ROWS, GLOBAL_BATCH, 0, 1, 1024)
    curve = []
    for step in range(STEPS):
        ids = torch.from_numpy(order.positions(step))
        loss = functional.cross_entropy(model(x[ids]), y[ids])
        stepper.zero_grad()
        loss.backward()
        stepper.step()
        curve.append(loss.item())
    return curve


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("task", TASKS)
def test_equals_a_plain_loop(task: str, optimizer: str, run_job: RunJob) -> None:
    expected = reference(TASKS[task], OPTIMIZERS[optimizer])
    for workers, micro_batch, steps in [(1, 0, FEW), (1, 8, FEW), (2, 0, FEW), (2, 4, FEW), (3, 0, FEW), (4, 5, STEPS)]:
        run = run_job(
            TASKS[task],
            {
                "train.steps": steps,
                "train.optimizer": OPTIMIZERS[optimizer],
                "train.micro_batch": micro_batch,
                "strategy.mesh": {"data": workers},
            },
        )
        which = f"{workers} workers, {micro_batch}"
        np.testing.assert_allclose(losses(run), expected[:steps], rtol=1e-5, err_msg=which)


AUGMENTED = (
    TRANSFORMER.format(dropout=0.2)
    + """
def augment(batch, random):
    return {**batch, "x": batch["x"] + 0.1 * random.normal(12)}
"""
)

# Without a bias before the normalisation: its true gradient is zero, so that Adam would turn rounding into steps.
BATCH_NORM = """
from torch import nn

def model():
    return nn.Sequential(nn.Linear(12, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16,
    5))
"""


@pytest.mark.parametrize(
    ("task", "changes"),
    [
        pytest.param(AUGMENTED, {}, id="dropout and augmentation"),
        pytest.param(BATCH_NORM, {"train.group": 8}, id="batch norm over groups"),
        pytest.param(BATCH_NORM, {"train.batch_norm": "global"}, id="batch norm over the global batch"),
        pytest.param(MLP, {"train.clip_norm": 0.1, "train.ema": 0.9, "train.schedule.warmup": 10}, id="clip, ema"),
    ],
)
def test_equals_its_own_single_process(task: str, changes: dict[str, Any], run_job: RunJob) -> None:
    changes = {"train.steps": FEW, "data.validation_fraction": 0.2, **changes}
    alone = run_job(task, changes)
    for workers in (2, 3, 4):
        run = run_job(task, {**changes, "strategy.mesh": {"data": workers}})
        np.testing.assert_allclose(losses(run), losses(alone), rtol=1e-5)
        ours, theirs = run.summary["metrics"]["loss"]["last"], alone.summary["metrics"]["loss"]["last"]
        assert ours == pytest.approx(theirs, rel=1e-5)


def test_activation_checkpointing_changes_nothing(run_job: RunJob) -> None:
    changes = {"train.steps": 10, "strategy.mesh": {"data": 2}}
    plain = run_job(AUGMENTED, changes)
    saving = run_job(AUGMENTED, {**changes, "train.activation_checkpointing": True})
    assert losses(saving) == losses(plain)


def test_fewer_samples_than_workers(run_job: RunJob) -> None:
    changes = {"train.steps": 6, "train.global_batch": 3}
    alone = run_job(MLP, changes, rows=7)
    four = run_job(MLP, {**changes, "strategy.mesh": {"data": 4}}, rows=7)
    np.testing.assert_allclose(losses(four), losses(alone), rtol=1e-5)


def test_a_parameter_that_nobody_uses_is_left_alone(run_job: RunJob) -> None:
    """Weight decay must not move what had no gradient, as it does not in one process."""
    task = """
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = nn.Linear(12, 5)
        self.unused = nn.Linear(3, 3)

    def forward(self, x):
        return self.used(x)

def model():
    return Model()
"""
    from verbund.checkpoint.read import Checkpoint

    expected = build(task).get_parameter("unused.weight").detach()
    for workers in (1, 2):
        changes = {"strategy.mesh": {"data": workers}, "train.optimizer.weight_decay": 0.5}
        run = run_job(task, changes)
        (folder,) = run.checkpoints.glob("step-*")
        saved = Checkpoint.open(folder).read("parameters", "unused.weight")
        assert torch.equal(saved, expected)
