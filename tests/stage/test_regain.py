"""A lost worker of a mesh that divides the model is replaced from memory: the result is that of an undisturbed run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from conftest import MLP, MakeJob, losses, wait_for
from processes import MARKED, pids, start_command, step_of, write_job
from verbund.job import parse_strategy
from verbund.run import Run
from verbund.stage import launch

STEPS = 120
SETTINGS: dict[str, Any] = {
    "cluster.replacements": 20,
    "cluster.heartbeat": 0.2,
    "cluster.threads": 1,
    "train.steps": STEPS,
    "train.optimizer": {"name": "adamw", "lr": 1e-3},
    "train.clip_norm": 1.0,
    "train.ema": 0.9,
    "validate.every": 40,
    "data.validation_fraction": 0.2,
}
TASK = MARKED.replace(
    MLP,
    """
from torch import nn

def model():
    return nn.Sequential(
        nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 5)
    )
""",
)


def start(make_job: MakeJob, folder: Path, strategy: str, **more: Any) -> Any:
    write_job(make_job, folder, {**SETTINGS, **parse_strategy(strategy), **more}, TASK)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLOW", "0.004" if "pipeline" in strategy else "0.03")  # of a micro-batch
        return start_command(folder)


def by_rank(folder: Path, world: int) -> list[int]:
    """The pids of the workers, by rank."""
    workers = pids(folder, world, 60)
    found: dict[int, int] = {}
    for path in (folder / "run" / "journal").glob("worker-*.jsonl"):
        head = json.loads(path.read_text().splitlines()[0])
        if head["pid"] in workers:
            found[head["rank"]] = head["pid"]
    return [found[rank] for rank in range(world)]


def check(folder: Path, command: Any, *, attempts: int | None = 1) -> list[dict[str, Any]]:
    """The run has ended as an undisturbed one does; its recoveries."""
    _, errors = command.communicate(timeout=100)
    assert command.returncode == 0, errors
    run = Run.open(folder / "run")
    summary = run.summary
    assert (summary["status"], summary["steps"]) == ("done", STEPS), errors
    assert summary["attempt"] == (attempts or summary["attempt"]), errors
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLOW", "0")
        undisturbed = launch.train(run.job, folder / "undisturbed")
    assert losses(run) == pytest.approx(losses(undisturbed), rel=1e-5)
    for name in ("loss", "accuracy"):
        assert summary["metrics"][name]["curve"] == [
            [step, pytest.approx(value, rel=1e-5)] for step, value in undisturbed.summary["metrics"][name]["curve"]
        ]
    assert summary["samples"] == undisturbed.summary["samples"]
    found = recoveries(folder)
    told = summary["membership"]
    assert told["recoveries"] == [{key: each[key] for key in ("how", "step", "again")} for each in found]
    if attempts == 1:
        assert told["steps_redone"] == sum(each["again"] for each in found)
    return found


def recoveries(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for path in (folder / "run" / "journal").glob("supervisor-*.jsonl")
        for line in path.read_text().splitlines()
        if '"recovery"' in line
    ]


@pytest.mark.parametrize("strategy", ["shard=2,data=2", "tensor=2,data=2", "pipeline=2,data=2"])
def test_one_of_two_that_hold_the_same(strategy: str, make_job: MakeJob, tmp_path: Path, shared_cluster: Any) -> None:
    command = start(make_job, tmp_path, strategy)
    workers = by_rank(tmp_path, 4)
    wait_for(lambda: step_of(tmp_path) > 10, "some steps", 60)
    os.kill(workers[0], signal.SIGKILL)
    assert [(each["how"], each["again"]) for each in check(tmp_path, command)] == [("peers", 0)]


def test_two_at_once_and_one_that_has_just_come(make_job: MakeJob, tmp_path: Path, shared_cluster: Any) -> None:
    """Of either replica one, whose parts the other has; and who takes a place while all meet."""
    command = start(make_job, tmp_path, "shard=2,data=2")
    workers = by_rank(tmp_path, 4)
    wait_for(lambda: step_of(tmp_path) > 10, "some steps", 60)
    for rank in (0, 3):
        os.kill(workers[rank], signal.SIGKILL)
    journal = tmp_path / "run" / "journal" / "worker-0-1-1.jsonl"
    wait_for(journal.exists, "who takes its place", 60)
    os.kill(json.loads(journal.read_text().splitlines()[0])["pid"], signal.SIGKILL)
    assert {(each["how"], each["again"]) for each in check(tmp_path, command)} == {("peers", 0)}


def test_one_that_has_just_started(make_job: MakeJob, tmp_path: Path, shared_cluster: Any) -> None:
    """While the others load, meet, build the model or compare it: they wait for another one, or all begin again."""
    command = start(make_job, tmp_path, "pipeline=2")
    journal = tmp_path / "run" / "journal" / "worker-1-1.jsonl"
    wait_for(lambda: journal.exists() and journal.read_text(), "its journal", 60)
    os.kill(json.loads(journal.read_text().splitlines()[0])["pid"], signal.SIGKILL)
    check(tmp_path, command, attempts=None)


def test_both_that_hold_the_same(make_job: MakeJob, tmp_path: Path, shared_cluster: Any) -> None:
    """Nobody has it in memory any more: the newest checkpoint has."""
    command = start(make_job, tmp_path, "shard=2,data=2", **{"checkpoint.every": 5})
    workers = by_rank(tmp_path, 4)
    wait_for(lambda: step_of(tmp_path) > 10, "some steps", 60)
    for rank in (1, 3):
        os.kill(workers[rank], signal.SIGKILL)
    assert check(tmp_path, command, attempts=2) == []


@pytest.mark.parametrize("strategy", ["shard=2", "pipeline=2"])
def test_mirrors(strategy: str, make_job: MakeJob, tmp_path: Path, shared_cluster: Any) -> None:
    """Nobody else trains the parts of the lost one: all go back to the newest mirrors, twice."""
    command = start(make_job, tmp_path, strategy, **{"checkpoint.mirror": 7})
    beyond = 10
    for rank in (0, 1):
        wait_for(lambda at=beyond: step_of(tmp_path) > at, "some steps", 60)
        os.kill(by_rank(tmp_path, 2)[rank], signal.SIGKILL)
        wait_for(lambda at=rank: len(recoveries(tmp_path)) > at, "the recovery", 60)
        beyond = step_of(tmp_path) + 10
    found = check(tmp_path, command)
    assert [each["how"] for each in found] == ["mirrors"] * 2
    assert all(each["step"] % 7 == 0 and 0 <= each["again"] <= 7 for each in found)


def test_who_is_asked_to_end_leaves_what_it_has(make_job: MakeJob, tmp_path: Path, shared_cluster: Any) -> None:
    """SIGTERM to a worker whose parts nobody else trains: they are handed over at the border of a step."""
    command = start(make_job, tmp_path, "shard=2")
    workers = by_rank(tmp_path, 2)
    wait_for(lambda: step_of(tmp_path) > 10, "some steps", 60)
    os.kill(workers[0], signal.SIGTERM)
    assert [(each["how"], each["again"]) for each in check(tmp_path, command)] == [("mirrors", 0)]


def test_at_the_end(make_job: MakeJob, tmp_path: Path, shared_cluster: Any) -> None:
    """Killed while the others save or leave: the run ends, with all that there is."""
    command = start(make_job, tmp_path, "shard=2", **{"train.steps": 30, "validate.every": "end"})
    workers = by_rank(tmp_path, 2)
    saves = tmp_path / "run" / "checkpoints"
    wait_for(lambda: [*saves.glob(".step-00000030*"), *saves.glob("step-00000030")], "the last save", 60)
    with contextlib.suppress(ProcessLookupError):
        os.kill(workers[1], signal.SIGKILL)
    _, errors = command.communicate(timeout=60)
    assert command.returncode == 0, errors
    summary = Run.open(tmp_path / "run").summary
    assert (summary["status"], summary["steps"]) == ("done", 30)
