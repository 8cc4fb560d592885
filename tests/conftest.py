"""One warm server for the whole test run: workers are forked from it in milliseconds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from verbund import task
from verbund.__main__ import main
from verbund.cluster.local import LocalCluster
from verbund.errors import Interrupted
from verbund.job import Job
from verbund.run import Run
from verbund.stage import before, doctor, launch

MLP = """
from torch import nn

def model():
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 5))
"""


@pytest.fixture(scope="session")
def warm() -> Iterator[LocalCluster]:
    cluster = LocalCluster(preload=["verbund.stage.preload_divided"])
    yield cluster
    cluster.close()


@pytest.fixture(scope="session")
def warm_transformers() -> Iterator[LocalCluster]:
    """A second one, which has imported transformers; only for tests that need it."""
    cluster = LocalCluster(preload=["verbund.stage.preload_divided", "transformers.modeling_utils"])
    yield cluster
    cluster.close()


@pytest.fixture
def shared_cluster(warm: LocalCluster, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> LocalCluster:
    """Stages started in this process fork from the one warm server."""

    @contextmanager
    def cluster(job: Job) -> Iterator[LocalCluster]:
        yield request.getfixturevalue("warm_transformers") if task.needs_transformers(job) else warm

    monkeypatch.setattr(before, "cluster_of", cluster)
    return warm


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder for a command's temporary files, with a short name: sockets lie in it."""
    with TemporaryDirectory(prefix="v-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For small tensors, of which threads would only wait for each other."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def nursery() -> Iterator[subprocess.Popen[str]]:
    """The process that forks all servers and clients of real federations."""
    command = [sys.executable, str(Path(__file__).parent / "stage" / "federated" / "nursery.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.terminate()


@pytest.fixture
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A folder that is a disk of its own, of 1500 kB or what the test is parametrised with."""
    place = tmp_path / "small"
    place.mkdir()
    size = getattr(request, "param", "1500k")
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


MakeJob = Callable[..., Job]


@pytest.fixture
def make_job(tmp_path: Path) -> MakeJob:
    """Writes a task and a small data set, and builds the job: `make_job(TASK, {"train.steps": 3})`."""

    def make(task: str = MLP, changes: dict[str, Any] | None = None, rows: int = 203, **columns: Any) -> Job:
        (tmp_path / "task.py").write_text(task)
        if not columns:
            random = np.random.default_rng(7)
            columns = {
                "x": random.normal(size=(rows, 12)).astype(np.float32),
                "y": random.integers(0, 5, rows),
            }
        np.savez(tmp_path / "data.npz", **columns)
        raw: dict[str, Any] = {
            "task": "task.py",
            "name": "test",
            "data": {"train": "data.npz", "input": "x", "target": "y", "cache": str(tmp_path / "cache")},
            "train": {"objective": "cross_entropy", "global_batch": 37, "steps": 5},
            "validate": {"every": "end"},
            "checkpoint": {"every": "end"},
        }
        changes = changes or {}
        if not any("parameter_server" in str(value) for value in changes.values()):
            raw["cluster"] = {"replacements": 0}  # whoever kills a process looks at what that alone leads to
        return Job.build(raw, changes, source="job.toml", folder=tmp_path)

    return make


@pytest.fixture
def run_job(shared_cluster: LocalCluster, make_job: MakeJob, tmp_path: Path) -> Callable[..., Run]:
    """Trains such a job in a directory of its own."""
    count = 0

    def run(task: str = MLP, changes: dict[str, Any] | None = None, **more: Any) -> Run:
        nonlocal count
        count += 1
        return launch.train(make_job(task, changes, **more), tmp_path / f"run-{count}")

    return run


Struck = Callable[..., tuple[Run, str]]


@pytest.fixture
def struck(
    shared_cluster: LocalCluster, make_job: MakeJob, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> Struck:
    """Trains in the directory `run` while a function, in a thread of its own, strikes the workers: `struck(task,
    changes, strike)` gives the run and what the user was told. A function that fails ends the run."""

    def train(task: str, changes: dict[str, Any], strike: Callable[[], object]) -> tuple[Run, str]:
        job, failed, over = make_job(task, changes), list[BaseException](), threading.Event()

        def struck() -> None:
            try:
                strike()
            except BaseException as error:
                failed.append(error)
                if not over.is_set():
                    os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=struck, daemon=True)
        capfd.readouterr()
        thread.start()
        try:
            run = launch.train(job, tmp_path / "run", quiet=False)
        except Interrupted:
            if not failed:
                raise
        finally:
            over.set()
            thread.join(100.0)
            assert not thread.is_alive()
        if failed:
            raise failed[0]
        return run, capfd.readouterr().err

    return train


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 20.0) -> Any:
    """What `condition` gives as soon as that is true."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.01)
    raise AssertionError(f"{what} did not come")


@dataclass
class Ended:
    status: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """Standard output, which is one JSON object and nothing else."""
        value = json.loads(self.out)
        assert isinstance(value, dict)
        return value


Command = Callable[..., Ended]


@pytest.fixture
def command(
    tmp_path: Path, shared_cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Command:
    """Runs `verbund …` in this process, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "_processes", lambda: doctor.Finding("two workers", "ok", "not tried here"))
    former = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def run(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["verbund", *arguments])
        capfd.readouterr()
        with pytest.raises(SystemExit) as left:
            main()
        for number, handler in former.items():
            signal.signal(number, handler)
        return Ended(int(left.value.code or 0), *capfd.readouterr())

    return run


def losses(run: Run) -> list[float]:
    """The loss after each step, from the run's summary."""
    return [loss for _, loss in run.summary["loss"]["curve"]]
