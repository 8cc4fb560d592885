"""Settings of a job that change what a run leaves, or how it computes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from conftest import MLP, losses
from verbund.run import Run
from verbund.stage import launch

RunJob = Callable[..., Run]


def test_tensorboard(run_job: RunJob) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    changes = {"observe.tensorboard": True, "data.validation_fraction": 0.2, "strategy.mesh": {"data": 2}}
    run = run_job(MLP, changes)
    events = EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    curve = losses(run)
    for event in events.Scalars("train/loss"):  # counted in steps done, and not each of them
        assert event.value == pytest.approx(curve[event.step - 1], rel=1e-6)
    assert events.Scalars("validation/accuracy")[-1].value == pytest.approx(run.summary["metrics"]["accuracy"]["last"])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lower_precision_follows_fp32(precision: str, run_job: RunJob) -> None:
    changes = {"train.steps": 20, "train.optimizer": {"name": "sgd", "lr": 0.1}, "strategy.mesh": {"data": 2}}
    full = run_job(MLP, changes)
    low = run_job(MLP, {**changes, "train.precision": precision})
    assert losses(low) != losses(full)
    np.testing.assert_allclose(losses(low), losses(full), rtol=0.02)


def test_a_map_style_dataset_with_random_augmentation(run_job: RunJob) -> None:
    """torch's own generator is seeded per sample, so any number of workers and loaders sees the same."""
    task = (
        MLP
        + """
import torch

class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return 101

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(12, generator=generator)
        return x + 0.1 * torch.randn(12), index % 5

def dataset():
    return Noisy()
"""
    )
    changes = {"data.train": None, "data.input": None, "data.target": None, "train.steps": 8}
    alone = run_job(task, changes)
    for workers, loaders in [(2, 0), (3, 2)]:
        run = run_job(task, {**changes, "strategy.mesh": {"data": workers}, "data.loaders": loaders})
        np.testing.assert_allclose(losses(run), losses(alone), rtol=1e-5)


def test_more_workers_than_cores_are_noted(run_job: RunJob) -> None:
    cores = len(os.sched_getaffinity(0))
    fits = run_job(changes={"strategy.mesh": {"data": cores}})
    assert not any("core" in note for note in fits.summary["notes"])
    crowded = run_job(changes={"strategy.mesh": {"data": cores + 1}})
    (note,) = [note for note in crowded.summary["notes"] if "core" in note]
    assert note.startswith(f"{cores + 1} workers share {cores} core")


def test_text_by_next_token(run_job: RunJob, tmp_path: Path) -> None:
    task = """
from torch import nn

class Bigram(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(256, 256)

    def forward(self, tokens):
        return self.table(tokens)

def model():
    return Bigram()
"""
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    changes = {
        "data": {"train": "text.txt", "sequence": 16, "validation_fraction": 0.2, "cache": str(tmp_path / "cache")},
        "train.objective": "next_token",
        "train.steps": 60,
        "train.optimizer": {"name": "adamw", "lr": 0.1},
    }
    alone = run_job(task, changes)
    two = run_job(task, {**changes, "strategy.mesh": {"data": 2}})
    np.testing.assert_allclose(losses(two), losses(alone), rtol=1e-5)
    perplexity = alone.summary["metrics"]["perplexity"]["last"]
    assert perplexity == pytest.approx(np.exp(alone.summary["metrics"]["loss"]["last"]), rel=1e-6)
    assert 1.0 < perplexity < 4.0, "each letter of this text leaves few successors"
    table = pq.read_table(launch.predict(alone.path, str(tmp_path / "text.txt")))
    token, probability = (np.stack(table[name].to_numpy(False)) for name in ("prediction", "probability"))
    assert token.shape == probability.shape == (table.num_rows, 16)
    assert ((probability > 1 / 256) & (probability <= 1)).all()
    assert set(map(chr, token.ravel())) <= set("the quick brown fox jumps over the lazy dog. ")


def test_images_by_class(run_job: RunJob, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    random = np.random.default_rng(0)
    for name, value in (("dark", 40), ("bright", 200)):
        folder = tmp_path / "images" / name
        folder.mkdir(parents=True)
        for number in range(12):
            pixels = random.normal(value, 10, (9, 7, 3)).clip(0, 255).astype(np.uint8)
            image.fromarray(pixels).save(folder / f"{number}.png")
    task = "from torch import nn\ndef model():\n    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 2))\n"
    changes = {
        "data": {
            "train": "images",
            "image_size": (8, 8),
            "input": "image",
            "target": "label",
            "scale": {"image": 255.0},
            "validation_fraction": 0.25,
            "cache": str(tmp_path / "cache"),
        },
        "train.steps": 60,
        "train.optimizer": {"name": "adamw", "lr": 0.02},
        "train.global_batch": 8,
        "strategy.mesh": {"data": 2},
    }
    run = run_job(task, changes)
    assert run.summary["metrics"]["accuracy"]["last"] == 1.0


def test_two_columns_binary_and_own_metrics(run_job: RunJob) -> None:
    task = """
from torch import nn

def model():
    return nn.Linear(3, 1)

def metrics(output, targets):
    return {"brier": (output.squeeze(1).sigmoid() - targets) ** 2}
"""
    random = np.random.default_rng(0)
    a, b = random.normal(size=(150, 2)).astype(np.float32), random.normal(size=150).astype(np.float32)
    changes = {
        "data.input": ["a", "b"],
        "train.objective": "binary_cross_entropy",
        "train.steps": 120,
        "train.optimizer": {"name": "sgd", "lr": 1.0},
        "data.validation_fraction": 0.3,
        "validate.metrics": ["accuracy", "roc_auc"],
    }
    run = run_job(task, changes, a=a, b=b, y=(a[:, 0] + b > 0).astype(np.int64))
    metrics = run.summary["metrics"]
    assert metrics["accuracy"]["last"] > 0.9
    assert metrics["roc_auc"]["last"] > 0.97
    assert 0.0 < metrics["brier"]["last"] < 0.15


def test_tied_and_frozen_parameters(run_job: RunJob) -> None:
    task = """
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.second = nn.Linear(12, 12)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(12, 12).requires_grad_(False)
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        return self.head(self.frozen(self.second(self.first(x).relu()).relu()))

def model():
    return Model()
"""
    alone = run_job(task, {"train.steps": 20})
    three = run_job(task, {"train.steps": 20, "strategy.mesh": {"data": 3}})
    np.testing.assert_allclose(losses(three), losses(alone), rtol=1e-5)


@pytest.mark.parametrize("layout", ["channels last", "transposed"])
def test_parameters_that_are_not_contiguous(layout: str, run_job: RunJob) -> None:
    if layout == "channels last":
        build = """nn.Sequential(
        nn.Unflatten(1, (3, 2, 2)), nn.Conv2d(3, 6, 2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(54, 5)
    ).to(memory_format=torch.channels_last)"""
    else:
        build = "transposed()"
    task = f"""
import torch
from torch import nn

def transposed():
    layer = nn.Linear(12, 5)
    layer.weight = nn.Parameter(torch.randn(12, 5).t())
    return layer

def model():
    return {build}
"""
    alone = run_job(task, {"train.steps": 10})
    three = run_job(task, {"train.steps": 10, "strategy.mesh": {"data": 3}})
    np.testing.assert_allclose(losses(three), losses(alone), rtol=1e-5)
