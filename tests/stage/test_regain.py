"""A lost worker of a mesh that divides the model is replaced from memory: the result is that of an undisturbed run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from conftest import MLP, Struck, losses, wait_for
from processes import MARKED, gone, passes, pids
from verbund.job import parse_strategy
from verbund.run import Run
from verbund.stage import launch

STEPS = 50
SETTINGS: dict[str, Any] = {
    "cluster.replacements": 20,
    "cluster.heartbeat": 0.2,
    "cluster.threads": 1,
    "train.steps": STEPS,
    "train.optimizer": {"name": "adamw", "lr": 1e-3},
    "train.clip_norm": 1.0,
    "train.ema": 0.9,
    "validate.every": 25,
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


def task(strategy: str) -> str:
    """With passes long enough to be struck in."""
    return TASK.replace("SLOW)", "0.004)" if "pipeline" in strategy else "0.03)")


def by_rank(folder: Path, world: int) -> list[int]:
    """The pids of the workers, by rank."""
    workers = pids(folder, world, 60)
    found: dict[int, int] = {}
    for path in (folder / "run" / "journal").glob("worker-*.jsonl"):
        head = json.loads(path.read_text().splitlines()[0])
        if head["pid"] in workers:
            found[head["rank"]] = head["pid"]
    return [found[rank] for rank in range(world)]


def check(run: Run, *, attempts: int | None = 1) -> list[dict[str, Any]]:
    """The run has ended as an undisturbed one does; its recoveries."""
    folder = run.path.parent
    summary = run.summary
    assert (summary["status"], summary["steps"]) == ("done", STEPS)
    assert summary["attempt"] == (attempts or summary["attempt"])
    (folder / "task.py").write_text(TASK.replace("SLOW)", "0)"))
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


def under(strategy: str, **more: Any) -> dict[str, Any]:
    return {**SETTINGS, **parse_strategy(strategy), **more}


def begun(folder: Path, world: int, strategy: str = "") -> list[int]:
    """The pids of the workers, by rank, once all have done ten steps: of eight passes in a pipeline of two stages."""
    least = 80 if "pipeline" in strategy else 10
    wait_for(lambda: passes(folder, world) > least, "some steps", 60)
    return by_rank(folder, world)


@pytest.mark.parametrize("strategy", ["shard=2,data=2", "tensor=2,data=2", "pipeline=2,data=2"])
def test_one_of_two_that_hold_the_same(strategy: str, struck: Struck, tmp_path: Path) -> None:
    run, _ = struck(task(strategy), under(strategy), lambda: os.kill(begun(tmp_path, 4, strategy)[0], signal.SIGKILL))
    assert [(each["how"], each["again"]) for each in check(run)] == [("peers", 0)]


def test_two_at_once_and_one_that_has_just_come(struck: Struck, tmp_path: Path) -> None:
    """Of either replica one, whose parts the other has; and who takes a place while all meet."""

    def strike() -> None:
        workers = begun(tmp_path, 4)
        for rank in (0, 3):
            os.kill(workers[rank], signal.SIGKILL)
        journal = tmp_path / "run" / "journal" / "worker-0-1-1.jsonl"
        wait_for(lambda: journal.exists() and journal.read_text(), "who takes its place", 60)
        os.kill(json.loads(journal.read_text().splitlines()[0])["pid"], signal.SIGKILL)

    run, _ = struck(task("shard=2"), under("shard=2,data=2"), strike)
    assert {(each["how"], each["again"]) for each in check(run)} == {("peers", 0)}


def test_one_that_has_just_started(struck: Struck, tmp_path: Path) -> None:
    """While the others load, meet, build the model or compare it: they wait for another one, or all begin again."""

    def strike() -> None:
        journal = tmp_path / "run" / "journal" / "worker-1-1.jsonl"
        wait_for(lambda: journal.exists() and journal.read_text(), "its journal", 60)
        os.kill(json.loads(journal.read_text().splitlines()[0])["pid"], signal.SIGKILL)

    run, _ = struck(task("pipeline=2"), under("pipeline=2"), strike)
    check(run, attempts=None)


def test_both_that_hold_the_same(struck: Struck, tmp_path: Path) -> None:
    """Nobody has it in memory any more: the newest checkpoint has."""

    def strike() -> None:
        workers = begun(tmp_path, 4)
        for rank in (1, 3):
            os.kill(workers[rank], signal.SIGKILL)

    run, _ = struck(task("shard=2"), under("shard=2,data=2", **{"checkpoint.every": 5}), strike)
    assert check(run, attempts=2) == []


@pytest.mark.parametrize("strategy", ["shard=2", "pipeline=2"])
def test_mirrors(strategy: str, struck: Struck, tmp_path: Path) -> None:
    """Nobody else trains the parts of the lost one: all go back to the newest mirrors, twice."""

    def strike() -> None:
        for rank in (0, 1):
            lost = begun(tmp_path, 2, strategy)[rank]
            os.kill(lost, signal.SIGKILL)
            assert gone([lost], 60)

    run, _ = struck(task(strategy), under(strategy, **{"checkpoint.mirror": 7}), strike)
    found = check(run)
    assert [each["how"] for each in found] == ["mirrors"] * 2
    assert all(each["step"] % 7 == 0 and 0 <= each["again"] <= 7 for each in found)


def test_who_is_asked_to_end_leaves_what_it_has(struck: Struck, tmp_path: Path) -> None:
    """SIGTERM to a worker whose parts nobody else trains: they are handed over at the border of a step."""
    run, _ = struck(task("shard=2"), under("shard=2"), lambda: os.kill(begun(tmp_path, 2)[0], signal.SIGTERM))
    assert [(each["how"], each["again"]) for each in check(run)] == [("mirrors", 0)]


def test_at_the_end(struck: Struck, tmp_path: Path) -> None:
    """Killed while the others save or leave: the run ends, with all that there is."""

    def strike() -> None:
        workers = by_rank(tmp_path, 2)
        saves = tmp_path / "run" / "checkpoints"
        wait_for(lambda: [*saves.glob(".step-00000030*"), *saves.glob("step-00000030")], "the last save", 60)
        with contextlib.suppress(ProcessLookupError):
            os.kill(workers[1], signal.SIGKILL)

    changes = under("shard=2", **{"train.steps": 30, "validate.every": "end"})
    summary = struck(task("shard=2"), changes, strike)[0].summary
    assert (summary["status"], summary["steps"]) == ("done", 30)
