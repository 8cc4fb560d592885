"""Predictions from the servers of a training that goes on."""

from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from conftest import MLP, Command, MakeJob, wait_for
from verbund.cluster.local import LocalCluster
from verbund.errors import InputError
from verbund.job import Job
from verbund.run import Run
from verbund.stage import before, launch

RunJob = Callable[..., Run]
# Whoever trains goes on once the file `go` is there.
HELD = """
import os, time
import torch
from pathlib import Path
HERE = Path(__file__).parent
def hold(training):
    if training:
        with open(HERE / "steps", "a") as file:
            file.write("x")
        while not (HERE / "go").exists() and (HERE / "steps").stat().st_size > 8:
            time.sleep(0.01)
"""
PLAIN = (
    HELD
    + """
from torch import nn
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 5))
    def forward(self, x):
        hold(self.training)
        return self.layers(x)
def model():
    return Model()
"""
)
TABLE = (
    HELD
    + """
from torch import nn
from verbund import Table
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows, self.head = Table(1000, 8, seed=3), nn.Linear(8, 5)
    def forward(self, x):
        hold(self.training)
        return self.head(self.rows(x))
def model():
    return Model()
"""
)
SERVED: dict[str, Any] = {
    "strategy.islands": 2,
    "strategy.exchange": {"name": "parameter_server", "servers": 2, "consistency": "asynchronous"},
    "train.optimizer": {"name": "sgd", "lr": 1e-3},
    "train.steps": 16,
}


@pytest.fixture(scope="module")
def another() -> Iterator[LocalCluster]:
    cluster = LocalCluster()
    yield cluster
    cluster.close()


@pytest.fixture(autouse=True)
def two_commands(shared_cluster: LocalCluster, another: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who trains has a cluster of its own."""

    @contextmanager
    def cluster(_: Job) -> Iterator[LocalCluster]:
        yield another if threading.current_thread().name == "training" else shared_cluster

    monkeypatch.setattr(before, "cluster_of", cluster)


@pytest.fixture
def new(tmp_path: Path) -> Path:
    np.savez(tmp_path / "new.npz", x=np.random.default_rng(1).normal(size=(40, 12)).astype(np.float32))
    return tmp_path / "new.npz"


@pytest.fixture
def ids(tmp_path: Path) -> Path:
    np.savez(tmp_path / "new.npz", x=np.random.default_rng(1).integers(0, 1000, 40))
    return tmp_path / "new.npz"


@contextmanager
def training(make: Callable[[], Any], folder: Path) -> Iterator[Run]:
    """A run that does some steps, and the others after this."""
    (folder / "go").unlink(missing_ok=True)
    job = make()
    ended: list[BaseException | Run] = []

    def train() -> None:
        try:
            ended.append(launch.train(job, folder / "run"))
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=train, name="training")
    thread.start()
    try:
        steps = folder / "steps"
        wait_for(lambda: ended or (steps.exists() and steps.stat().st_size > 8), "some steps", 40)
        assert not ended, ended
        yield Run.open(folder / "run")
    finally:
        (folder / "go").touch()
        thread.join(60)
    assert isinstance(ended[0], Run), ended


def probabilities(path: Path) -> Any:
    return np.stack(pq.read_table(path)["probability"].to_numpy())


@pytest.mark.parametrize("workers", [1, 2])
def test_close_to_the_end_of_a_slow_training(workers: int, make_job: MakeJob, new: Path, tmp_path: Path) -> None:
    with training(lambda: make_job(PLAIN, SERVED), tmp_path) as run:
        assert stat.S_IMODE(os.stat(run.servers / "address").st_mode) == 0o600
        found = launch.predicted(run.path, str(new), tmp_path / "live.parquet", workers=workers, live=True)
        assert found.versions is not None
        assert 1 <= found.versions[0] <= found.versions[1] < 16
    assert not run.servers.exists()
    assert run.summary["steps"] == 16
    assert run.summary["failures"] == []
    after = launch.predict(run.path, str(new), tmp_path / "after.parquet")
    live = probabilities(found.path)
    np.testing.assert_allclose(live, probabilities(after), atol=0.05)
    assert not np.array_equal(live, probabilities(after))


def test_rows_of_a_table(make_job: MakeJob, ids: Path, tmp_path: Path) -> None:
    random = np.random.default_rng(2)
    columns = {"x": random.integers(0, 1000, 203), "y": random.integers(0, 5, 203)}
    with training(lambda: make_job(TABLE, SERVED, **columns), tmp_path) as run:
        path = launch.predict(run.path, str(ids), tmp_path / "live.parquet", workers=1, live=True)
    after = launch.predict(run.path, str(ids), tmp_path / "after.parquet", workers=1)
    np.testing.assert_allclose(probabilities(path), probabilities(after), atol=0.02)


def test_the_answer_names_the_versions(command: Command, make_job: MakeJob, new: Path, tmp_path: Path) -> None:
    with training(lambda: make_job(PLAIN, SERVED), tmp_path) as run:
        ended = command("predict", str(run.path), str(new), "--live", "--workers", "1", "--json")
        assert ended.status == 0, ended.err
        assert 1 <= ended.document["versions"]["oldest"] <= ended.document["versions"]["newest"] < 16
        ended = command("predict", str(run.path), str(new), "--live", "--step", "3", "--json")
        assert ended.status == 2
        assert "--step" in json.dumps(ended.document["cause"])


def test_another_model_is_refused(shared_cluster: LocalCluster, make_job: MakeJob, new: Path, tmp_path: Path) -> None:
    with training(lambda: make_job(PLAIN, SERVED), tmp_path) as run:
        task = tmp_path / "task.py"
        task.write_text(PLAIN.replace("16", "17"))
        with pytest.raises(InputError, match=r"not the one that is being trained: `layers.0.bias`.*17.*16"):
            launch.predict(run.path, str(new), workers=1, live=True)
        task.write_text(PLAIN)


def test_runs_without_servers_are_refused(run_job: RunJob, new: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no parameter servers: its exchange is `all_reduce`"):
        launch.predict(run_job(MLP).path, str(new), live=True)
    with pytest.raises(InputError, match="is not being trained"):
        launch.predict(run_job(MLP, SERVED).path, str(new), live=True)
