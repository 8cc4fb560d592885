"""A run that goes on under another mesh: its losses are those of a single process that was never stopped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import models
from conftest import losses
from parallel.layouts import CHECKPOINTS
from verbund.cluster.local import LocalCluster
from verbund.job import parse_strategy
from verbund.run import Run
from verbund.stage import launch

# Every mesh is saved under and loaded under; with AdamW, an average, clipping and dropout.
COVER = [(a, CHECKPOINTS[(index + 3) % len(CHECKPOINTS)]) for index, a in enumerate(CHECKPOINTS)]
CHANGES = {
    "train.steps": 4,
    "train.ema": 0.8,
    "train.clip_norm": 0.5,
    "train.optimizer": {"name": "adamw", "lr": 0.01, "groups": [{"match": "*norm*", "weight_decay": 0.0}]},
}


def reference(folder: Path) -> list[float]:
    return losses(launch.train(models.job("encoder", folder, CHANGES), folder / "reference"))


@pytest.mark.parametrize(("before", "after"), COVER)
def test_goes_on_under_another_mesh(before: str, after: str, shared_cluster: LocalCluster, tmp_path: Path) -> None:
    expected = reference(tmp_path)
    first = models.job("encoder", tmp_path, {**CHANGES, **parse_strategy(before), "train.steps": 2})
    run = launch.train(first, tmp_path / "run")
    run = launch.resume(run.path, {**parse_strategy(after), "train.steps": 4})
    assert losses(run) == pytest.approx(expected, rel=2e-5)
    found = launch.validate(run.path, data=str(tmp_path / "encoder.npz"), workers=1)
    alone = launch.validate(tmp_path / "reference", data=str(tmp_path / "encoder.npz"), workers=1)
    assert found["metrics"]["loss"] == pytest.approx(alone["metrics"]["loss"], rel=2e-5)


def test_ftrl_under_two_meshes(shared_cluster: LocalCluster, tmp_path: Path) -> None:
    changes = {"train.steps": 4, "train.optimizer": {"name": "ftrl", "lr": 0.05, "l1": 1e-4}}
    expected = losses(launch.train(models.job("encoder", tmp_path, changes), tmp_path / "reference"))
    first = models.job("encoder", tmp_path, {**changes, **parse_strategy("tensor=2,shard=2"), "train.steps": 2})
    run = launch.train(first, tmp_path / "run")
    run = launch.resume(run.path, {**parse_strategy("shard=3"), "train.steps": 4})
    assert losses(run) == pytest.approx(expected, rel=2e-5)


@pytest.mark.parametrize("mesh", ["tensor=2,pipeline=2", "shard=2,data=2", "shard=2,pipeline=2"])
def test_bf16_with_validation_and_prediction(mesh: str, shared_cluster: LocalCluster, tmp_path: Path) -> None:
    """A stage after the other under a divided mesh: the numbers are those of one process within bf16's rounding."""
    changes = {"train.precision": "bf16", "train.steps": 3, "data.validation_fraction": 0.3}
    alone = launch.train(models.job("encoder", tmp_path, changes), tmp_path / "alone")
    run = launch.train(models.job("encoder", tmp_path, {**changes, **parse_strategy(mesh)}), tmp_path / "run")
    assert losses(run) == pytest.approx(losses(alone), rel=2e-2)
    validated = [r.summary["metrics"]["loss"]["last"] for r in (run, alone)]
    assert validated[0] == pytest.approx(validated[1], rel=2e-2)
    tables = [
        pq.read_table(launch.predict(r.path, str(tmp_path / "encoder.npz"), tmp_path / f"{r.path.name}.parquet"))
        for r in (run, alone)
    ]
    assert tables[0].num_rows == tables[1].num_rows == 61
    assert tables[0]["sample"].to_pylist() == list(range(61))
    one, other = (np.stack(table["probability"].to_numpy(zero_copy_only=False)) for table in tables)
    np.testing.assert_allclose(one, other, atol=0.05)


def test_notes_of_a_former_mesh_are_gone(run_job: Callable[..., Run]) -> None:
    run = run_job(changes={**parse_strategy("pipeline=2"), "train.steps": 2})
    assert any("Pipeline stages" in note for note in run.summary["notes"])
    run = launch.resume(run.path, {**parse_strategy("data=2"), "train.steps": 3})
    assert not any("Pipeline stages" in note for note in run.summary["notes"])
