"""Bad input: a clear error that says what, where and what to do, with exit status 2, before any worker starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import MLP, MakeJob
from verbund.cluster import local
from verbund.errors import InputError, JobError, RunFailed
from verbund.job import Job
from verbund.run import Run
from verbund.stage import launch

RunJob = Callable[..., Run]
TO_TARGET: dict[str, Any] = {"data.validation_fraction": 0.2, "validate.metrics": ["accuracy"]}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train.epochs": 0}, ["train.epochs", "greater than 0"]),
        ({"train.optimiser": "sgd"}, ["train.optimiser", "unknown key", "`optimizer`"]),
        ({"strategy.mesh": {"data": 0}}, ["axis `data` has 0 workers"]),
        ({"strategy.mesh": {"data": -2}}, ["axis `data` has -2 workers"]),
        ({"strategy.mesh": {"dat": 2}}, ["no axis of a mesh", "`data`"]),
        ({"strategy.exchange": "dilocco"}, ["must be", "`diloco`"]),
        ({"strategy.exchange.every": 8}, ["`every`", "local_sgd and diloco", "`all_reduce`"]),
        ({"strategy.exchange": {"name": "local_sgd", "outer_lr": 0.3}}, ["`outer_lr`", "diloco"]),
        ({"strategy.exchange": {"name": "diloco", "every": 4, "delay": 4}}, ["`delay`", "less than"]),
        ({"strategy.exchange": {"name": "diloco", "every": 4, "fragments": 5}}, ["5 fragments", "`every`"]),
        ({"strategy.exchange": "diloco", "train.ema": 0.9}, ["`train.ema`", "diloco"]),
        ({"strategy.islands": 0}, ["at least 1"]),
        ({"strategy.islands": 40}, ["cannot be shared", "global_batch"]),
        ({"train.steps": None, "train.epochs": None}, ["no end"]),
        ({"train.patience": {"validations": 2}}, ["need validation data"]),
    ],
)
def test_job_file(changes: dict[str, Any], words: list[str], make_job: MakeJob) -> None:
    with pytest.raises(JobError) as caught:
        make_job(changes=changes)
    for word in words:
        assert word in str(caught.value)
    assert caught.value.exit_status == 2


def test_all_problems_at_once(make_job: MakeJob) -> None:
    with pytest.raises(JobError) as caught:
        make_job(changes={"train.global_batch": 0, "data.inputs": "x", "validate.evry": 3})
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("def model(:\n", ["task.py, line 1", "syntax error"]),
        ("from torch import nn\n", ["no function `model()`"]),
        ("import nothing_of_this_name\n", ["ModuleNotFoundError", "line 1"]),
        ("model = 3\n", ["`model` is not a function"]),
        ("def model():\n    return 3\n", ["returned a int"]),
        ("from torch import nn\ndef model():\n    return nn.ReLU()\n", ["without parameters"]),
        (MLP + "def optimizers(model):\n    return []\n", ["several optimisers"]),
        (MLP + "def loss(output, targets):\n    return output.mean()\n", ["`loss` returned", "never a mean"]),
        (MLP + "def loss(output, targets):\n    return 3.0\n", ["`loss` returned a float"]),
        (
            "from torch import nn\ndef model():\n    return nn.Linear(3, 5)\n",
            ["shapes cannot be multiplied"],
        ),
        (
            "from torch import nn\ndef model():\n    return nn.Sequential(nn.Linear(12, 5), nn.Flatten(0))\n",
            [""],
        ),
    ],
)
def test_task_file(task: str, words: list[str], run_job: RunJob) -> None:
    with pytest.raises((InputError, RunFailed)) as caught:
        run_job(task)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"task": "missing.py"}, ["missing.py", "no such file"]),
        ({"data.train": "missing.parquet"}, ["missing.parquet"]),
        ({"data.train": "sklearn:digit"}, ["digit", "digits"]),
        ({"data.input": "z"}, ["`z`"]),
        ({"data.target": "yy"}, ["`yy`"]),
        ({"data.input": None}, ["no input", "The data has `x`, `y`: name one or more as `input` in [data]"]),
        ({"data.target": None}, ["no target", "The data has `x`, `y`: name one or more as `target` in [data]"]),
        ({"train.optimizer.name": "adamm"}, ["adamm", "dam"]),
        ({"train.optimizer.weight_decai": 0.1}, ["weight_decai", "weight_decay"]),
        ({"train.optimizer.name": "lbfgs"}, ["lbfgs", "adamw"]),
        (
            {"train.optimizer.name": "muon", "strategy.exchange": "parameter_server"},
            ["`muon` needs whole parameters", "ftrl"],
        ),
        ({"train.optimizer.groups": [{"match": "*.weihgt", "lr": 0.1}]}, ["*.weihgt"]),
        ({"validate.metrics": ["acuracy"]}, ["acuracy", "accuracy"]),
        (
            {**TO_TARGET, "train.target": {"metric": "acc", "value": 0.5}},
            ["train.target.metric", "`acc`", "Known: accuracy, loss"],
        ),
        ({**TO_TARGET, "train.patience": {"metric": "top_3"}}, ["train.patience.metric: `top_3` is no metric"]),
        ({**TO_TARGET, "train.patience": {"metric": "f1"}}, ["Add it to `validate.metrics`"]),
        ({"train.schedule.name": "cosine", "train.steps": None, "train.seconds": 5.0}, ["schedule"]),
    ],
)
def test_job_against_task_and_data(changes: dict[str, Any], words: list[str], run_job: RunJob) -> None:
    with pytest.raises(InputError) as caught:
        run_job(changes=changes)
    for word in words:
        assert word in str(caught.value)


def columns(**changes: Any) -> dict[str, Any]:
    random = np.random.default_rng(1)
    return {"x": random.normal(size=(20, 12)).astype(np.float32), "y": random.integers(0, 5, 20), **changes}


def test_nan_in_a_label(run_job: RunJob) -> None:
    y = np.zeros(20)
    y[13] = np.nan
    with pytest.raises(InputError) as caught:
        run_job(**columns(y=y))
    assert "`y`" in str(caught.value)
    assert "13" in str(caught.value)


def test_labels_of_the_wrong_type(run_job: RunJob) -> None:
    with pytest.raises(InputError, match="y"):
        run_job(**columns(y=np.linspace(0.0, 1.0, 20)))


@pytest.mark.parametrize("label", [-1, 5, 1_000_000])
def test_class_out_of_range(label: int, run_job: RunJob) -> None:
    y = np.zeros(20, np.int64)
    y[7] = label
    with pytest.raises((InputError, RunFailed)) as caught:
        run_job(**columns(y=y))
    assert str(label) in str(caught.value)


def test_empty_data(run_job: RunJob) -> None:
    with pytest.raises(InputError, match=r"empty|no samples|0 rows|no rows"):
        run_job(x=np.zeros((0, 12), np.float32), y=np.zeros(0, np.int64))


def test_existing_directory_is_left_alone(make_job: MakeJob, tmp_path: Path) -> None:
    place = tmp_path / "mine"
    place.mkdir()
    (place / "precious").write_text("data")
    with pytest.raises(InputError, match="exists already"):
        launch.train(make_job(), place)
    assert (place / "precious").read_text() == "data"


def test_more_memory_than_there_is(run_job: RunJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "available_bytes", lambda: 1000)
    with pytest.raises(InputError, match=r"workers need about .* of memory"):
        run_job(changes={"strategy.mesh": {"data": 3}})


def test_sparse_gradients_are_refused(run_job: RunJob) -> None:
    task = """
from torch import nn
def inputs(batch):
    return batch["y"]
def model():
    return Model()
class Model(nn.Embedding):
    def forward(self, ids):
        return nn.functional.embedding(ids, self.weight, sparse=True)
"""
    with pytest.raises(InputError, match=r"`weight` has sparse gradients.*without sparse=True"):
        run_job(task.replace("Model()", "Model(5, 5)"), {"train.optimizer.name": "sgd"})


def test_job_file_that_is_no_toml(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("task = \n")
    with pytest.raises(JobError, match="is not TOML"):
        Job.read(path)
    with pytest.raises(JobError, match="no such job file"):
        Job.read(tmp_path / "other.toml")
