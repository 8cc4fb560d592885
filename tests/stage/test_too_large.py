"""Models that do not fit into one process: what is checked of them before they train in parts."""

from __future__ import annotations

import json
import math
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import MLP, MakeJob, losses
from verbund.cluster import local
from verbund.cluster.local import LocalCluster
from verbund.errors import InputError
from verbund.job import parse_strategy
from verbund.mesh.axes import Mesh
from verbund.run import Run
from verbund.stage import before, launch
from verbund.stage.refill import mirrors_kept

ADAM = {"train.optimizer": {"name": "adam", "lr": 0.01}}
BLOCKS = """
from torch import nn

def model():
    return nn.Sequential(nn.Linear(12, 32), nn.Dropout(0.2), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 5))
"""


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch, shared_cluster: LocalCluster) -> None:
    """The whole model does not fit; its parts do."""
    monkeypatch.setattr(local, "available_bytes", lambda: 1000)
    monkeypatch.setattr(before, "_check_memory", lambda *_: None)


@pytest.mark.parametrize("mesh", ["shard=2", "pipeline=2", "tensor=2", "shard=2,pipeline=2"])
@pytest.mark.usefixtures("no_room")
def test_it_trains_in_parts(mesh: str, run_job: Callable[..., Run]) -> None:
    expected = losses(run_job(BLOCKS, ADAM))
    run = run_job(BLOCKS, {**ADAM, **parse_strategy(mesh)})
    assert losses(run) == pytest.approx(expected, rel=1e-5)
    notes = [note for note in run.summary["notes"] if "The dry run was left out: the model takes" in note]
    assert len(notes) == 1
    assert "whether the divided model computes what the whole one does" in notes[0]


@pytest.mark.parametrize(
    ("task", "changes", "words"),
    [
        (MLP.replace("nn.Linear(16, 5)", "nn.Linear(8, 5)"), {}, "layer `2`, Linear(in_features=8"),
        (MLP.replace("nn.Linear(16, 5)", "nn.Linear(16, 3)"), {}, "classes"),
        (MLP, {"train.optimizer": {"name": "adam", "lr": 0.1, "groups": [{"match": "head.*", "lr": 1}]}}, "head.*"),
        (MLP, {"train.optimizer": {"name": "muon", "lr": 0.1}}, "muon"),
        (MLP, parse_strategy("pipeline=3"), "3 stages are wanted"),
        (MLP + "\ndef loss(output, targets):\n    return output.mean(3)\n", {"train.objective": None}, "line 8"),
        (
            "from torch import nn\ndef model():\n    return nn.Linear(12, 5).requires_grad_(False)\n",
            {},
            "no parameter of the model requires a gradient",
        ),
    ],
)
@pytest.mark.usefixtures("no_room")
def test_what_is_wrong_is_found_without_values(
    task: str, changes: dict[str, Any], words: str, make_job: MakeJob
) -> None:
    with pytest.raises(InputError) as caught:
        launch.check(make_job(task, {**parse_strategy("shard=2"), **changes}))
    assert words in str(caught.value)
    assert caught.value.exit_status == 2


@pytest.mark.usefixtures("no_room")
def test_a_model_whose_constructor_reads_values(make_job: MakeJob) -> None:
    task = (
        MLP
        + """
whole = model
def model():
    made = whole()
    made[0].weight.data.numpy()
    return made
"""
    )
    notes = launch.check(make_job(task, parse_strategy("shard=2"))).notes
    assert any(note.startswith("Every worker builds the whole model") and "task.py:" in note for note in notes)
    assert not any("left out" in note for note in notes)


def test_too_little_for_the_parts_too(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch, shared_cluster: LocalCluster
) -> None:
    monkeypatch.setattr(local, "available_bytes", lambda: 1000)
    with pytest.raises(InputError, match=r"2 workers need about .* \(estimated without a dry run\)"):
        launch.check(make_job(changes=parse_strategy("shard=2")))


@pytest.mark.usefixtures("no_room")
def test_mirrors_are_counted(make_job: MakeJob) -> None:
    """Two of all that a worker holds between steps, and two of another's where each is alone on its host."""
    shapes = [(16, 12), (16,), (5, 16), (5,)]
    held = 3 * sum(4 * math.prod(shape) for shape in shapes)  # Adam has two moments of each value
    settings = {**ADAM, **parse_strategy("shard=2"), "cluster.replacements": 3}
    needs = [launch.check(make_job(changes={**settings, "checkpoint.mirror": every})) for every in (0, 1)]
    assert needs[1].worker_bytes - needs[0].worker_bytes == pytest.approx(2 * held / 2, abs=2)
    hosts = {"cluster.kind": "hosts", "cluster.hosts": ["a", "b"], "cluster.trusted_network": "10.0.0.0/8"}
    for changes, strategy, kept in (
        ({}, "shard=2", 2),
        ({}, "shard=2,data=2", 0),
        ({"checkpoint.mirror": 5}, "shard=2,data=2", 2),
        (hosts, "shard=2", 4),
        (hosts, "shard=4", 2),
        ({}, "data=2", 0),
    ):
        job = make_job(changes={**parse_strategy(strategy), "cluster.replacements": 3, **changes})
        assert mirrors_kept(job, Mesh.of(job.strategy, 0)) == kept, strategy


def test_a_mesh_that_would_fit_is_named(make_job: MakeJob, shared_cluster: LocalCluster) -> None:
    job = make_job(changes=parse_strategy("shard=2"))
    facts = launch.check(job)
    size = next(size for name, size, _ in facts.other_meshes if name == "shard=8")
    limited = before.Facts(**{**vars(facts), "worker_bytes": 10 * size, "process_bytes": size})
    with pytest.raises(InputError, match=r"a worker needs about .* a process may take .*Use the mesh .*shard=8"):
        before._check_memory(shared_cluster, job, limited)


LARGE = """
from torch import nn

def model():
    width = 2048
    layers = [nn.Linear(12, width), *(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(18))]
    return nn.Sequential(*layers, nn.Linear(width, 5))
"""
LARGE_BYTES = 18 * 2048**2 * 4


def test_under_a_real_limit(make_job: MakeJob, tmp_path: Path, temporary: Path) -> None:
    """A model of 300 MB, and as much for its gradients; no process may take both."""
    sgd = {"train.optimizer": {"name": "sgd", "lr": 0.01}}
    changes = {**sgd, **parse_strategy("pipeline=2"), "train.steps": 2, "train.global_batch": 8, "cluster.threads": 1}
    (tmp_path / "job.toml").write_text(make_job(LARGE, changes, rows=40).toml())
    code = "import verbund.stage.preflight, verbund.stage.preload_divided; print(open('/proc/self/status').read())"
    status = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    empty = int(status.partition("VmSize:")[2].split()[0]) * 1024
    limit = empty + LARGE_BYTES * 22 // 10
    command = subprocess.run(
        [sys.executable, "-m", "verbund", "train", "job.toml", "--run", "run", "--json"],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(temporary), "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert command.returncode == 0, command.stderr
    summary = json.loads(command.stdout)
    assert any("The dry run was left out" in note for note in summary["notes"])
