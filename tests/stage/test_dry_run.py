"""What the dry run finds before any worker starts, and how it says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from conftest import MLP, MakeJob
from verbund.cluster.local import LocalCluster
from verbund.errors import InputError
from verbund.stage import launch

Check = Callable[..., list[str]]


@pytest.fixture
def check(shared_cluster: LocalCluster, make_job: MakeJob) -> Check:
    """The notes of a job's check."""

    def run(task: str = MLP, changes: dict[str, Any] | None = None, **more: Any) -> list[str]:
        return launch.check(make_job(task, changes, **more)).notes

    return run


def refused(check: Check, *arguments: Any, **more: Any) -> str:
    with pytest.raises(InputError) as caught:
        check(*arguments, **more)
    assert caught.value.exit_status == 2
    return str(caught.value)


def model(*layers: str) -> str:
    return f"from torch import nn\ndef model():\n    return nn.Sequential({', '.join(layers)})\n"


# -- layers and outputs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        (
            ("nn.Linear(12, 16)", "nn.ReLU()", "nn.Linear(8, 5)"),
            ["model():", "layer `2`, Linear(in_features=8", "[37, 16]", "in_features=16"],
        ),
        (("nn.Unflatten(1, (3, 4))", "nn.Linear(12, 5)"), ["layer `1`, Linear", "[37, 3, 4]", "nn.Flatten()"]),
        (("nn.Unflatten(1, (3, 2, 2))", "nn.Conv2d(4, 5, 1)"), ["layer `1`, Conv2d", "in_channels=3"]),
        (("nn.Sequential(nn.BatchNorm1d(9))",), ["layer `0.0`, BatchNorm1d", "num_features=12"]),
        (("nn.Linear(12, 5)", "nn.Flatten(0)"), ["`cross_entropy` cannot compare"]),
    ],
)
def test_the_layer_that_fails(layers: tuple[str, ...], words: list[str], check: Check) -> None:
    message = refused(check, model(*layers))
    for word in words:
        assert word in message
    assert "randomness" not in message


def test_an_error_in_the_users_own_forward_names_the_line_and_the_layer(check: Check) -> None:
    task = """
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(13, 5)
    def forward(self, x):
        return self.fc(x)
def model():
    return Net()
"""
    message = refused(check, task)
    assert "task.py, line 8" in message
    assert "layer `fc`, Linear(in_features=13" in message


FUNCTIONS = """
from torch import nn
def fails():
    raise ValueError("a bad day")
"""
MODEL = "def model():\n    return nn.Linear(12, 5)\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def model():\n    fails()\n", ["ValueError in `model()`: a bad day", "line 4"]),
        (MODEL + "def augment(batch, random):\n    fails()\n", ["ValueError: a bad day", "line 4"]),
        (MODEL + "def augment(batch, random):\n    pass\n", ["`augment` returned a NoneType"]),
        (MODEL + "def inputs(batch):\n    fails()\n", ["ValueError: a bad day", "line 4"]),
        (MODEL + "def loss(output, targets):\n    return output.detach()[:, 0]\n", ["look for detach()"]),
        ("def model():\n    import torch\n    return torch.jit.script(nn.Linear(13, 5))\n", ["TorchScript"]),
    ],
)
def test_functions_that_fail(text: str, words: list[str], check: Check) -> None:
    message = refused(check, FUNCTIONS + text)
    for word in ["task.py", *words]:
        assert word in message


def test_a_scripted_model(check: Check) -> None:
    assert check(FUNCTIONS + "def model():\n    import torch\n    return torch.jit.script(nn.Linear(12, 5))\n") == []


def test_a_dataset_that_fails(check: Check) -> None:
    nothing = {"data.train": None, "data.input": None, "data.target": None}
    assert "ValueError in `dataset()`" in refused(check, FUNCTIONS + MODEL + "def dataset():\n    fails()\n", nothing)
    task = FUNCTIONS + MODEL + "class D(list):\n    def __getitem__(self, i):\n        fails()\n"
    message = refused(check, task + "def dataset():\n    return D([1] * 50)\n", nothing)
    assert "ValueError in sample" in message


def test_a_compiled_model_fails_as_a_plain_one(check: Check) -> None:
    message = refused(check, model("nn.Linear(12, 16)", "nn.Linear(8, 5)"), {"train.compile": True})
    assert "layer `1`, Linear(in_features=8" in message


@pytest.mark.parametrize("label", [5, 1_000_000, 2**63 - 1])
def test_a_class_without_an_output(label: int, check: Check) -> None:
    y = np.zeros(300, np.int64)
    y[207] = label
    message = refused(check, x=np.zeros((300, 12), np.float32), y=y)
    for word in (f"`y` is {label}", "data.npz, row 207", "5 outputs", "layer `2`, Linear(in_features=16", "model()"):
        assert word in message


def test_an_ignored_class_needs_no_output(check: Check) -> None:
    y = np.zeros(300, np.int64)
    y[207] = 255
    columns = {"x": np.zeros((300, 12), np.float32), "y": y}
    assert "`y` is 255" in refused(check, **columns)
    check(changes={"train.objective": {"name": "cross_entropy", "ignore_index": 255}}, **columns)


def test_more_classes_by_name_than_outputs(check: Check) -> None:
    y = np.array(["ape", "bee", "cat", "dog", "eel", "fox"] * 10)
    message = refused(check, x=np.zeros((60, 12), np.float32), y=y)
    assert "`y` has 6 classes, 5 (`fox`) among them in" in message
    assert "data.npz, row 5" in message
    assert "Give the model 6 outputs" in message


def test_own_targets_are_the_tasks_business(check: Check) -> None:
    y = np.arange(300) % 10
    check(MLP + "def targets(batch):\n    return batch['y'] % 5\n", x=np.zeros((300, 12), np.float32), y=y)


def test_a_loss_that_is_not_finite_before_anything_is_learnt(check: Check) -> None:
    task = MLP + "def loss(output, targets):\n    return (output[:, 0] * 0 - 1).log()\n"
    message = refused(check, task)
    assert "is not finite with the model's first weights" in message
    task = (
        MLP
        + """
import torch
def dataset():
    x = torch.randn(37, 12)
    x[13, 4] = float("inf")
    return torch.utils.data.TensorDataset(x, torch.zeros(37, dtype=torch.int64))
"""
    )
    message = refused(check, task, {"data.train": None, "data.input": None, "data.target": None})
    assert "`input` of sample 13 has inf in it" in message


# -- validation ------------------------------------------------------------------------------------------------------

METRICS = MLP + "def metrics(output, targets):\n    {}\n"


def test_an_exception_in_the_tasks_metrics(check: Check) -> None:
    message = refused(check, METRICS.format("return {'a': output.nothing}"), {"data.validation_fraction": 0.3})
    assert "task.py, line 7" in message
    assert "AttributeError" in message


def test_a_loss_that_fails_in_evaluation(check: Check) -> None:
    task = (
        MLP
        + """
import torch
def loss(output, targets):
    if not torch.is_grad_enabled():
        raise ValueError("a bad day")
    return nn.functional.cross_entropy(output, targets, reduction="none")
"""
    )
    assert "ValueError: a bad day" in refused(check, task, {"data.validation_fraction": 0.3})


@pytest.mark.parametrize("key", ["target", "patience"])
def test_a_metric_that_does_not_exist(key: str, check: Check) -> None:
    end = {"metric": "acuracy", "value": 1.0} if key == "target" else {"metric": "acuracy"}
    message = refused(check, changes={"data.validation_fraction": 0.3, f"train.{key}": end})
    assert "`acuracy` is no metric" in message
    assert "accuracy" in message


# -- batch statistics ------------------------------------------------------------------------------------------------

NORM = model("nn.Linear(12, 16)", "nn.BatchNorm1d(16)", "nn.Linear(16, 5)")


def test_groups_of_one_sample(check: Check) -> None:
    assert "train.group: batch statistics" in refused(check, NORM, {"train.group": 1})
    assert "train.group: `couples`" in refused(check, MLP + "couples = True\n", {"train.group": 1})
    check(NORM, {"train.group": 1, "train.batch_norm": "global"})


def test_a_sample_that_groups_leave_alone(check: Check) -> None:
    message = refused(check, NORM, {"train.group": 31, "train.global_batch": 32}, rows=64)
    assert "groups of 31 leave 1 alone" in message
    assert "Set `train.group` to 30" in message
    check(NORM, {"train.group": 30, "train.global_batch": 32}, rows=64)


@pytest.mark.parametrize("kind", ["group", "global"])
def test_a_last_batch_of_one_sample(kind: str, check: Check) -> None:
    changes = {"train.global_batch": 32, "train.steps": 3, "train.batch_norm": kind}
    message = refused(check, NORM, changes, rows=65)
    assert "the last global batch of an epoch has 1 sample" in message
    check(NORM, changes | {"train.steps": 2}, rows=65)  # never gets there
    many = model("nn.Unflatten(1, (3, 2, 2))", "nn.BatchNorm2d(3)", "nn.Flatten()", "nn.Linear(12, 5)")
    check(many, changes, rows=65)  # four values a sample have a variance


def test_a_worker_of_one_sample_with_statistics_over_all(check: Check) -> None:
    changes = {"train.global_batch": 2, "train.batch_norm": "global", "strategy.mesh": {"data": 3}}
    check(NORM, changes, rows=64)


# -- buffers ---------------------------------------------------------------------------------------------------------

BUFFER = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(12, 5)
        self.register_buffer("own", torch.zeros({shape}), persistent={kept})
    def forward(self, x):
        if self.training:
            with torch.no_grad():
                {change}
        return self.fc(x) + self.own.sum() * 0
def model():
    return Net()
"""


@pytest.mark.parametrize(
    ("change", "exact"),
    [
        ("self.own.lerp_(x.mean(0), 0.1)", True),
        ("self.own += 1", True),
        ("self.own.lerp_(x.sum(0), 0.1)", False),
        ("self.own.copy_(torch.maximum(self.own, x.amax(0)))", False),
        ("self.own += len(x)", False),
    ],
)
def test_a_buffer_of_the_models_own(change: str, exact: bool, check: Check) -> None:
    task = BUFFER.format(shape=12, kept=True, change=change)
    if exact:
        assert not any("buffer" in note for note in check(task, {"strategy.mesh": {"data": 2}}))
        return
    (note,) = check(task)
    assert note.startswith("The buffer `own` changes in training by an amount")
    message = refused(check, task, {"strategy.mesh": {"data": 2}})
    assert "buffer `own`" in message
    assert "couples = True" in message
    check(task + "couples = True\n", {"strategy.mesh": {"data": 2}})


def test_a_counter_of_samples(check: Check) -> None:
    task = BUFFER.format(shape="(), dtype=torch.int64", kept=True, change="self.own += len(x)")
    assert "buffer `own`" in refused(check, task, {"train.micro_batch": 9})
    task = BUFFER.format(shape="(), dtype=torch.int64", kept=True, change="self.own += 1")
    assert not check(task, {"train.micro_batch": 9})


def test_a_buffer_that_is_not_saved(check: Check) -> None:
    task = BUFFER.format(shape=12, kept=False, change="self.own.lerp_(x.mean(0), 0.1)")
    assert "no part of the model's state" in refused(check, task, {"strategy.mesh": {"data": 2}})
    task = BUFFER.format(shape=12, kept=False, change="self.own.fill_(3.0)")
    assert not check(task, {"strategy.mesh": {"data": 2}})


def test_a_buffer_that_something_else_changes(check: Check) -> None:
    task = BUFFER.format(shape=1 << 17, kept=True, change="torch._foreach_add_([*self.buffers()], 1.0)")
    assert "not by its module's own methods" in refused(check, task)
