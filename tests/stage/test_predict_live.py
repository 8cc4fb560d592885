"""Predictions from the servers of a training that goes on."""

from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from conftest import MLP, Command, MakeJob, wait_for
from trained import close
from verbund.cluster.local import LocalCluster
from verbund.errors import ClusterLost, InputError
from verbund.job import Job
from verbund.run import Run
from verbund.stage import before, launch

RunJob = Callable[..., Run]
# Each worker does eight steps, and the others once the file `go` is there.
HELD = """
import time
from pathlib import Path
HERE = Path(__file__).parent
passes = 0
def hold(training):
    global passes
    passes += training
    while passes > 8 and not (HERE / "go").exists():
        (HERE / "held").touch()
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

def inputs(batch):
    while passes == 0 and (HERE / "end").exists() and (HERE / "run" / "servers").exists():
        (HERE / "reading").touch()
        time.sleep(0.01)
    return batch["x"]
"""
)
SERVED: dict[str, Any] = {
    "strategy.islands": 2,
    "strategy.exchange": {"name": "parameter_server", "servers": 2},
    "train.optimizer": {"name": "sgd", "lr": 0.1},
    "train.steps": 12,
    "checkpoint.every": 8,
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
        saved = folder / "run" / "checkpoints" / "step-00000008"
        wait_for(lambda: ended or ((folder / "held").exists() and saved.exists()), "eight steps", 40)
        assert not ended, ended
        yield Run.open(folder / "run")
    finally:
        (folder / "go").touch()
        thread.join(60)
    assert isinstance(ended[0], Run), ended


@pytest.mark.parametrize("workers", [1, 2])
def test_what_the_servers_have(workers: int, make_job: MakeJob, new: Path, tmp_path: Path) -> None:
    """It is what a checkpoint of the same step has, and training is as if nobody had read."""
    with training(lambda: make_job(PLAIN, SERVED), tmp_path) as run:
        assert stat.S_IMODE(os.stat(run.servers / "address").st_mode) == 0o600
        found = launch.predicted(run.path, str(new), tmp_path / "live.parquet", workers=workers, live=True)
        assert found.versions == (8, 8)
        saved = launch.predict(run.path, str(new), tmp_path / "saved.parquet", step=8)
        assert pq.read_table(found.path) == pq.read_table(saved)
    assert not run.servers.exists()
    assert (run.summary["steps"], run.summary["failures"]) == (12, [])
    after = launch.predict(run.path, str(new), tmp_path / "after.parquet")
    assert pq.read_table(after) != pq.read_table(saved)
    other = launch.train(make_job(PLAIN, SERVED), tmp_path / "other")
    close(run, other, 1e-6)


def test_rows_of_a_table(make_job: MakeJob, ids: Path, tmp_path: Path) -> None:
    random = np.random.default_rng(2)
    columns = {"x": random.integers(0, 1000, 203), "y": random.integers(0, 5, 203)}
    with training(lambda: make_job(TABLE, SERVED, **columns), tmp_path) as run:
        found = launch.predicted(run.path, str(ids), tmp_path / "live.parquet", workers=1, live=True)
        saved = launch.predict(run.path, str(ids), tmp_path / "saved.parquet", workers=1, step=8)
        assert pq.read_table(found.path) == pq.read_table(saved)
        assert found.versions == (8, 8)


def test_training_that_ends_meanwhile(make_job: MakeJob, ids: Path, tmp_path: Path) -> None:
    """Who still reads is told soon."""
    random = np.random.default_rng(2)
    columns = {"x": random.integers(0, 1000, 203), "y": random.integers(0, 5, 203)}
    pool = ThreadPoolExecutor(1)
    with training(lambda: make_job(TABLE, SERVED, **columns), tmp_path) as run:
        (tmp_path / "end").touch()
        path = tmp_path / "live.parquet"
        reading = pool.submit(launch.predict, run.path, str(ids), path, workers=1, live=True)
        wait_for(lambda: reading.done() or (tmp_path / "reading").exists(), "a reader")
        assert not reading.done(), reading.exception()
        (tmp_path / "go").touch()
        with pytest.raises(ClusterLost, match="the run is not being trained any more"):
            reading.result(30)


def test_the_answer_names_the_versions(command: Command, make_job: MakeJob, new: Path, tmp_path: Path) -> None:
    with training(lambda: make_job(PLAIN, SERVED), tmp_path) as run:
        ended = command("predict", str(run.path), str(new), "--live", "--workers", "1", "--json")
        assert ended.status == 0, ended.err
        assert ended.document["versions"] == {"oldest": 8, "newest": 8}
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
