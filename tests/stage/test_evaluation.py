"""Validation and prediction: each sample exactly once, the same bits for any number of workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch.nn import functional

from conftest import MLP
from verbund import checkpoint
from verbund.checkpoint.read import Checkpoint
from verbund.errors import CheckpointError, InputError
from verbund.run import Run
from verbund.stage import launch

RunJob = Callable[..., Run]
METRICS = ["accuracy", "top_2", "f1", "confusion_matrix", "roc_auc"]


def test_the_same_bits_for_any_number_of_workers(run_job: RunJob) -> None:
    changes = {"data.validation_fraction": 0.4, "validate.batch": 7, "validate.metrics": METRICS}
    run = run_job(MLP, changes)
    results = [launch.validate(run.path, workers=workers) for workers in (1, 2, 3, 4)]
    assert all(repr(result["metrics"]) == repr(results[0]["metrics"]) for result in results)
    assert results[0]["samples"] == np.sum(results[0]["metrics"]["confusion_matrix"])
    assert results[0]["metrics"]["loss"] == run.summary["metrics"]["loss"]["last"]


def outputs(run: Run, x: np.ndarray) -> torch.Tensor:
    """The model applied by plain torch to the checkpoint's tensors."""
    (folder,) = run.checkpoints.glob("step-*")
    saved = Checkpoint.open(folder)
    w0, b0, w2, b2 = (saved.read("parameters", n) for n in ("0.weight", "0.bias", "2.weight", "2.bias"))
    return functional.linear(functional.linear(torch.from_numpy(x), w0, b0).relu(), w2, b2)


@pytest.mark.parametrize("workers", [1, 3])
def test_predictions_in_order(workers: int, run_job: RunJob, tmp_path: Path) -> None:
    run = run_job(MLP)
    x = np.random.default_rng(3).normal(size=(61, 12)).astype(np.float32)
    np.savez(tmp_path / "new.npz", x=x)  # without targets
    path = launch.predict(run.path, str(tmp_path / "new.npz"), tmp_path / "out.parquet", workers=workers)
    table = pq.read_table(path)
    expected = outputs(run, x)
    assert table["sample"].to_pylist() == list(range(61))
    assert table["prediction"].to_pylist() == expected.argmax(1).tolist()
    np.testing.assert_allclose(np.array(table["probability"].to_pylist()), expected.softmax(1).numpy(), rtol=1e-5)
    assert not list(tmp_path.glob(".out*"))


def test_metrics_of_other_data(run_job: RunJob, tmp_path: Path) -> None:
    run = run_job(MLP)
    random = np.random.default_rng(4)
    x, y = random.normal(size=(90, 12)).astype(np.float32), random.integers(0, 5, 90)
    np.savez(tmp_path / "other.npz", x=x, y=y)
    result = launch.validate(run.path, data=str(tmp_path / "other.npz"), workers=2)
    expected = outputs(run, x)
    assert result["samples"] == 90
    assert result["metrics"]["accuracy"] == np.mean(expected.argmax(1).numpy() == y)
    loss = functional.cross_entropy(expected.double(), torch.from_numpy(y)).item()
    assert result["metrics"]["loss"] == pytest.approx(loss, rel=1e-6)


def test_other_data_with_more_classes_than_outputs(run_job: RunJob, tmp_path: Path) -> None:
    run = run_job(MLP)
    y = np.arange(90) % 5
    y[71] = 7
    np.savez(tmp_path / "other.npz", x=np.zeros((90, 12), np.float32), y=y)
    with pytest.raises(InputError, match=r"`y` is 7 in .*other.npz, row 71, but the model has 5 outputs"):
        launch.validate(run.path, data=str(tmp_path / "other.npz"), workers=2)


def test_no_validation_data(run_job: RunJob) -> None:
    run = run_job(MLP)
    with pytest.raises(InputError, match="validation data"):
        launch.validate(run.path)


def test_missing_column(run_job: RunJob, tmp_path: Path) -> None:
    run = run_job(MLP)
    np.savez(tmp_path / "other.npz", z=np.zeros((5, 12), np.float32))
    with pytest.raises(InputError, match="`x`"):
        launch.predict(run.path, str(tmp_path / "other.npz"), tmp_path / "out.parquet")
    assert not (tmp_path / "out.parquet").exists()


def test_a_target_ends_training(run_job: RunJob) -> None:
    rows = 400
    random = np.random.default_rng(5)
    x = random.normal(size=(rows, 12)).astype(np.float32)
    run = run_job(
        MLP,
        {
            "train.steps": 2000,
            "train.target": {"metric": "accuracy", "value": 0.9},
            "validate.every": 10,
            "data.validation_fraction": 0.25,
            "train.optimizer": {"name": "adamw", "lr": 0.01},
            "strategy.mesh": {"data": 2},
        },
        x=x,
        y=(x[:, 0] > 0).astype(np.int64),
    )
    assert run.summary["ended_by"] == "target"
    assert run.summary["metrics"]["accuracy"]["last"] >= 0.9
    assert run.summary["steps"] % 10 == 0


def test_patience_ends_training(run_job: RunJob) -> None:
    changes = {
        "train.steps": 5000,
        "train.patience": {"metric": "loss", "validations": 3},
        "validate.every": 5,
        "data.validation_fraction": 0.3,
        "train.optimizer": {"name": "adamw", "lr": 0.05},
        "strategy.mesh": {"data": 2},
    }
    run = run_job(MLP, changes)
    values = [value for _, value in run.summary["metrics"]["loss"]["curve"]]
    assert run.summary["ended_by"] == "patience"
    assert len(values) - 1 - values.index(min(values)) == 3


def test_time_ends_training(run_job: RunJob) -> None:
    changes = {"train.steps": 10_000_000, "train.seconds": 1.0, "strategy.mesh": {"data": 2}}
    run = run_job(MLP, changes)
    assert run.summary["ended_by"] == "seconds"
    assert 0.9 < run.summary["seconds"]["total"] < 10


def test_a_checkpoint_that_is_removed_while_it_is_chosen(run_job: RunJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run goes on and prunes between the look for the newest checkpoint and its use: the next one is taken."""
    run = run_job(changes={"train.steps": 2, "checkpoint.every": 1, "checkpoint.keep": 2})
    newest = checkpoint.newest_valid
    older = checkpoint.folder(run.checkpoints, 1)
    looked = 0

    def late(checkpoints: Path) -> tuple[Path, list[str]]:
        nonlocal looked
        looked += 1
        if looked == 1:
            assert checkpoint.prune(checkpoints, 1) == [older]
            return older, []
        return newest(checkpoints)

    monkeypatch.setattr(launch.checkpoint, "newest_valid", late)
    with launch.chosen(run, None) as path:
        assert path == checkpoint.folder(run.checkpoints, 2)
    assert looked == 2
    with pytest.raises(CheckpointError, match="no checkpoint of step 1"), launch.chosen(run, 1):
        pass
