"""The examples, with little data."""

from __future__ import annotations

import base64
import hashlib
import importlib
import io
import json
import shutil
import tarfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conftest import Command, Ended

SERVED = ("strategy.mesh={}", "strategy.islands=2", "strategy.exchange=parameter_server")
EXAMPLES = Path(__file__).parent.parent / "examples"


def copied(name: str, folder: Path) -> None:
    """An example's files in a folder of their own, where data and runs may be written."""
    for path in (EXAMPLES / name).iterdir():
        if path.is_file():
            shutil.copy(path, folder)


def train(command: Command, folder: Path, *changes: str) -> Ended:
    """Trains the job in the folder."""
    settings = [word for change in (f"data.cache={folder / 'cache'}", *changes) for word in ("--set", change)]
    return command("train", "job.toml", "--json", *settings)


@pytest.fixture
def flights(tmp_path: Path) -> Path:
    """As vega-datasets has them: delays that depend on the hour and on the pair of airports."""
    random = np.random.default_rng(0)
    count = 6000
    minute = np.sort(random.integers(0, 181 * 24 * 60, count))
    origin, destination = random.integers(0, 12, (2, count))
    expected = 12 * np.cos(minute / 60 % 24 / 4) + 15 * ((origin * destination) % 3 == 1)
    codes = np.array([f"A{chr(65 + number)}X" for number in range(12)])
    table = {
        "date": np.datetime64("2001-01-01", "us") + minute.astype("timedelta64[m]"),
        "delay": (expected + random.normal(0, 8, count)).astype(np.int64),
        "distance": random.integers(100, 2000, count),
        "origin": codes[origin],
        "destination": codes[destination],
    }
    pq.write_table(pa.table(table), tmp_path / "flights-3m.parquet")
    return tmp_path / "flights-3m.parquet"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a script of an example."""
    import sys

    def load(example: str, name: str) -> ModuleType:
        monkeypatch.syspath_prepend(EXAMPLES / example)
        for other in ("flights", "prepare", "baseline", "recommender"):
            monkeypatch.delitem(sys.modules, other, raising=False)
        return importlib.import_module(name)

    yield load
    for other in ("flights", "prepare", "baseline", "recommender"):
        sys.modules.pop(other, None)


def test_flights(
    flights: Path, tmp_path: Path, module: Any, command: Command, capfd: pytest.CaptureFixture[str]
) -> None:
    copied("flights", tmp_path)
    module("flights", "prepare").main(["--source", str(flights), "--out", str(tmp_path / "data"), "--rows", "5000"])
    training, validation = (pq.read_table(tmp_path / "data" / f"{name}.parquet") for name in ("train", "validation"))
    assert len(training) + len(validation) == 5000
    assert set(training["month"].to_pylist()) == {1, 2, 3, 4, 5}
    assert set(validation["month"].to_pylist()) == {6}
    assert {str(training[name].type) for name in ("origin", "pair", "hour", "weekday")} == {"int32"}
    pair, origin, destination = (training[name].to_numpy() for name in ("pair", "origin", "destination"))
    assert bool((pair == origin * 256 + destination).all())
    ended = train(command, tmp_path, "train.global_batch=128", "train.epochs=6")
    assert ended.status == 0, ended.err
    capfd.readouterr()
    module("flights", "baseline").main(["--data", str(tmp_path / "data")])
    baseline = json.loads(capfd.readouterr().out)["roc_auc"]
    # With little data the pairs' embeddings have not learnt more than the regression, but as much.
    assert ended.document["metrics"]["roc_auc"]["best"] > baseline - 0.05 > 0.6


def test_flights_from_the_registry(flights: Path, tmp_path: Path, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The archive's sum and sizes are checked before anything of it is read."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as files:
        files.add(flights, "package/data/flights-3m.parquet")
    archive = packed.getvalue()
    prepare = module("flights", "prepare")
    monkeypatch.setattr(prepare.urllib.request, "urlopen", lambda *_, **__: io.BytesIO(archive))
    with pytest.raises(SystemExit, match="SHA-512 differs"):
        prepare.main(["--out", str(tmp_path / "out")])
    monkeypatch.setattr(prepare, "SHA512", base64.b64encode(hashlib.sha512(archive).digest()).decode())
    prepare.main(["--out", str(tmp_path / "out")])
    assert len(pq.read_table(tmp_path / "out")) == 6000
    monkeypatch.setattr(prepare, "LARGEST_FILE", 1000)
    with pytest.raises(SystemExit, match="no file of at most 1000 bytes"):
        prepare.main(["--out", str(tmp_path / "out")])
    monkeypatch.setattr(prepare, "LARGEST_ARCHIVE", 1000)
    with pytest.raises(SystemExit, match="more than 1000 bytes"):
        prepare.main(["--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match="no such file"):
        prepare.main(["--source", str(tmp_path / "missing.parquet")])


def test_recommender(tmp_path: Path, module: Any, command: Command, capfd: pytest.CaptureFixture[str]) -> None:
    copied("recommender", tmp_path)
    sizes = ("--users", "150", "--items", "80", "--ratings", "20000")
    module("recommender", "prepare").main(["--out", str(tmp_path / "data"), *sizes])
    known = json.loads(capfd.readouterr().out)
    assert known["rmse_of_the_noise"] == pytest.approx(0.5, rel=0.05)
    counts = np.bincount(pq.read_table(tmp_path / "data" / "ratings.parquet")["item"].to_numpy(), minlength=80)
    assert counts.max() > 10 * np.median(counts)
    ended = train(command, tmp_path, "train.global_batch=256", "train.epochs=8")
    assert ended.status == 0, ended.err
    rmse = ended.document["metrics"]["rmse"]["last"]
    assert known["rmse_of_the_noise"] < rmse < 0.6 < known["rmse_of_the_mean"]
    served = train(command, tmp_path, "train.global_batch=256", "train.epochs=8", *SERVED)
    assert served.status == 0, served.err
    assert served.document["metrics"]["rmse"]["last"] == pytest.approx(rmse, rel=1e-4)


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.iterdir() if (path / "job.toml").exists()))
def test_jobs_are_valid(name: str) -> None:
    from verbund.job import Job

    assert Job.read(EXAMPLES / name / "job.toml").task
