"""What a user sees of a run with parameter servers, besides its numbers."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from conftest import Command, MakeJob
from verbund.cluster.local import LocalCluster
from verbund.errors import InputError
from verbund.job import parse_strategy
from verbund.stage import before, launch
from verbund.stage.served import verified as served
from verbund.stage.verify import verify

TWO = "islands=2,exchange=parameter_server"


@pytest.mark.parametrize("consistency", ["bulk_synchronous", "asynchronous"])
def test_progress_goes_forward_and_tells_the_speed(
    consistency: str,
    shared_cluster: LocalCluster,
    make_job: MakeJob,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("verbund.observe.progress._LINE_SECONDS", 0.0)
    strategy = parse_strategy(f"{TWO},exchange.consistency={consistency}")
    run = launch.train(make_job(changes={**strategy, "train.steps": 300}), tmp_path / "run", quiet=False)
    said = capfd.readouterr().err
    lines = [line for line in said.splitlines() if re.match(r"step \d+/300, loss", line)]
    steps = [int(line.split("/")[0].removeprefix("step ")) for line in lines]
    assert steps == sorted(set(steps)), said
    assert steps[-1] == 300, said
    assert any("samples/s" in line for line in lines), said
    page = (run.path / "report.html").read_text()
    assert "Parameter servers" in page
    assert "pulling from the servers" in page
    assert "that came too late" not in page  # a column of zeros


TABLES = """
import torch
from torch import nn
from verbund import Table

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = Table(3000, 4, seed=2)
        self.words = nn.Embedding(3000, 4, sparse=True)
        self.head = nn.Linear(8, 5)
    def forward(self, ids):
        return self.head(torch.cat([self.table(ids), self.words(ids)], 1))

def model():
    return Model()

def inputs(batch):
    return batch["ids"]
"""


@pytest.mark.parametrize("consistency", ["bulk_synchronous", "asynchronous"])
def test_validation_and_prediction_without_servers_are_those_of_the_run(
    consistency: str, shared_cluster: LocalCluster, make_job: MakeJob, tmp_path: Path
) -> None:
    random = np.random.default_rng(3)
    ids, y = random.integers(0, 3000, 203), random.integers(0, 5, 203)
    changes = {
        **parse_strategy(f"{TWO},exchange.servers=2,exchange.consistency={consistency}"),
        "data.input": "ids",
        "data.validation_fraction": 0.3,
        "train.optimizer": {"name": "adagrad", "lr": 0.3},
        "train.steps": 12,
    }
    run = launch.train(make_job(TABLES, changes, ids=ids, y=y), tmp_path / "run")
    metrics = {name: values["last"] for name, values in run.summary["metrics"].items()}
    others = parse_strategy(f"data=2,{TWO},exchange.servers=3")
    for found in (
        launch.validate(run.path),
        launch.validate(run.path, workers=1),
        launch.validate(run.path, strategy=others),
    ):
        assert found["metrics"] == metrics
    launch.predict(run.path, str(tmp_path / "data.npz"), tmp_path / "out.parquet")
    assert pq.read_table(tmp_path / "out.parquet").num_rows == 203


VERIFIED = """
task = "task.py"
data = { train = "data.npz", input = "x", target = "y", cache = "cache" }
train = { objective = "cross_entropy", global_batch = 37, steps = 5 }
"""


def test_verify_starts_servers(command: Command, make_job: MakeJob, tmp_path: Path) -> None:
    make_job()
    (tmp_path / "job.toml").write_text(VERIFIED)
    strategy = "islands=2,data=2,exchange=parameter_server,exchange.servers=2"
    ended = command("verify", "job.toml", "--strategy", strategy, "--json")
    assert ended.status == 0, ended.err
    found = json.loads(ended.out)
    assert len(found["losses"][0]) == len(found["losses"][1]) == 3
    assert set(found["differences"]) == {"loss", "parameters", "buffers"}
    assert found["differences"]["parameters"]["difference"] < 1e-5
    assert found["left_out"] == ["servers keep no gradients: losses and parameters were compared"]


def test_verify_clips_and_leaves_compression_out(command: Command, make_job: MakeJob, tmp_path: Path) -> None:
    make_job()
    (tmp_path / "job.toml").write_text(VERIFIED.replace("steps = 5", "steps = 5, clip_norm = 0.3"))
    strategy = "islands=2,exchange=parameter_server,exchange.compression=int8"
    ended = command("verify", "job.toml", "--strategy", strategy, "--json")
    assert ended.status == 0, ended.err
    found = json.loads(ended.out)
    assert found["passed"]
    assert found["differences"]["parameters"]["difference"] < 1e-5
    assert found["left_out"][0].startswith("compression `int8` is inexact")


def test_verify_finds_servers_that_step_otherwise(
    make_job: MakeJob, shared_cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if a share had been taken with twice its weight: another rate on one side."""
    job = make_job(changes={**parse_strategy(TWO), "train.optimizer": {"name": "sgd", "lr": 0.1}})
    former = served.settings
    monkeypatch.setattr(
        served, "settings", lambda steps: {**former(steps), "train.optimizer": {"name": "sgd", "lr": 0.1001}}
    )
    found = verify(job)
    assert not found["passed"]
    assert found["differences"]["parameters"]["difference"] > 1e-4


@pytest.mark.parametrize("consistency", ["bounded_staleness", "asynchronous"])
def test_verify_says_what_it_leaves_out(consistency: str, command: Command, make_job: MakeJob, tmp_path: Path) -> None:
    make_job()
    (tmp_path / "job.toml").write_text(VERIFIED)
    ended = command("verify", "job.toml", "--strategy", f"{TWO},exchange.consistency={consistency}")
    assert ended.status == 0, ended.err
    assert "no servers were started" in ended.out + ended.err
    assert "decays whatever an optimiser remembers" in ended.out + ended.err


def test_tables_that_no_checkpoint_has_room_for_are_refused(
    shared_cluster: LocalCluster, make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That goes by what is written for certain; of a `Table` nobody knows how many rows will be used."""
    ids = np.random.default_rng(3).integers(0, 3000, 203)
    changes = {**parse_strategy(TWO), "data.input": "ids", "train.optimizer": {"name": "adagrad", "lr": 0.3}}
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(before, "_MUCH", 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=40_000))
    with pytest.raises(InputError, match=r"each checkpoint takes 0\.0 MB for the tables, of which all rows have"):
        launch.train(make_job(TABLES, changes, ids=ids, y=np.zeros(203, np.int64)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_huge_table_takes_the_space_of_the_rows_that_are_used(
    shared_cluster: LocalCluster, make_job: MakeJob, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A mesh could not hold it; its checkpoint is small, and servers go on from that."""
    ids = np.random.default_rng(3).integers(0, 2**31, 203)
    task = TABLES.replace("Table(3000", "Table(2**31").replace("words(ids)", "words(ids % 3000)")
    changes = {
        **parse_strategy(TWO),
        "data.input": "ids",
        "train.optimizer": {"name": "adagrad", "lr": 0.3},
        "train.steps": 3,
    }
    job = make_job(task, changes, ids=ids, y=np.zeros(203, np.int64))
    run = launch.train(job, tmp_path / "run", quiet=False)
    written = sum(file.stat().st_size for file in run.checkpoints.rglob("*") if file.is_file())
    assert 48_000 < written < 100_000
    assert "up to 68.7 GB once all of their rows are used" in capfd.readouterr().err
    again = launch.resume(run.path, {"train.steps": 6})
    assert again.summary["steps"] == 6


def test_a_table_beyond_all_addresses_is_refused(
    shared_cluster: LocalCluster, make_job: MakeJob, tmp_path: Path
) -> None:
    task = TABLES.replace("Table(3000", "Table(2**42")
    changes = {**parse_strategy(TWO), "data.input": "ids", "train.optimizer": {"name": "adagrad", "lr": 0.3}}
    job = make_job(task, changes, ids=np.arange(203), y=np.zeros(203, np.int64))
    with pytest.raises(InputError, match=r"no room for the addresses of [0-9.]+ TB, used or not"):
        launch.train(job, tmp_path / "run")
