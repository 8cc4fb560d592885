"""Workers come and go while a training goes on: the numbers are those of an undisturbed run, and no step is lost."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import Command, MakeJob, Struck, and_end, losses, wait_for
from processes import MARKED, alive, exactly, gone, passes, pids, scaled, write_job
from verbund.errors import ClusterLost, Interrupted
from verbund.run import Run
from verbund.stage import launch

NORMALISED = MARKED.replace(
    "nn.Linear(12, 16), nn.ReLU(),", "nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.ReLU(),"
)
SETTINGS: dict[str, Any] = {
    "cluster.replacements": 0,
    "cluster.threads": 1,
    "strategy.mesh": {"data": 3},
    "train.steps": 100_000,
    "train.group": 5,
    "train.optimizer": {"name": "adamw", "lr": 1e-3},
    "train.ema": 0.9,
    "data.validation_fraction": 0.2,
    "validate.every": 200,
}


def _trained(struck: Struck, folder: Path, strike: Callable[[], object], **changes: Any) -> Run:
    """Ctrl-C once that is done, and what was trained until then against a run that nobody disturbed."""
    with pytest.raises(Interrupted):
        struck(NORMALISED, {**SETTINGS, **changes}, and_end(strike))
    run = Run.open(folder / "run")
    found = losses(run)
    assert run.summary["steps"] == len(found) == run.summary["checkpoints"]["last_step"]
    whole = json.loads(json.dumps(run.job.resolved()))
    whole["train"]["steps"] = len(found)
    (folder / "task.py").write_text(NORMALISED.replace("SLOW)", "0)"))
    undisturbed = launch.train(type(run.job).build(whole, {}, source="job.toml", folder=folder), folder / "undisturbed")
    assert found == pytest.approx(losses(undisturbed), rel=1e-5)
    assert run.summary["samples"] == undisturbed.summary["samples"]
    return run


def test_scaled_up_and_down(struck: Struck, tmp_path: Path) -> None:
    def strike() -> None:
        before = pids(tmp_path, 2, 60)
        grown = scaled(tmp_path, 4)
        assert (grown["exit"], grown["former"], grown["workers"]) == (0, 2, 4)
        assert set(before) < set(exactly(tmp_path, 4))
        refused = scaled(tmp_path, 5)
        assert (refused["exit"], refused["cause"]["where"]) == (2, "arguments")
        assert "takes 1 to 4" in refused["cause"]["what"]
        assert scaled(tmp_path, 1)["workers"] == 1
        last = exactly(tmp_path, 1)
        assert scaled(tmp_path, 3)["former"] == 1
        assert set(last) < set(exactly(tmp_path, 3))

    run = _trained(struck, tmp_path, strike, **{"cluster.max_workers": 4, "strategy.mesh": {"data": 2}})
    assert run.summary["world"] == 2


def test_one_is_preempted(struck: Struck, tmp_path: Path) -> None:
    """SIGTERM to the first worker, and then to a later one: each ends by itself, and another takes its place."""

    def strike() -> None:
        first = pids(tmp_path, 3, 60)
        for rank in (0, 1):
            victim = first[rank]
            before = exactly(tmp_path, 3)
            os.kill(victim, signal.SIGTERM)
            assert gone([victim], 20)
            after = exactly(tmp_path, 3)
            assert set(before) - {victim} < set(after)

    run = _trained(struck, tmp_path, strike)
    assert run.summary["attempt"] == 1
    assert sum("was asked to end" in event["why"] for event in _events(run, "replacement")) == 2


@pytest.mark.parametrize(
    "strategy", [{"mesh": {"shard": 2}}, {"islands": 2, "exchange": {"name": "local_sgd", "every": 4}}]
)
def test_one_is_preempted_that_has_what_no_other_has(strategy: dict[str, Any], struck: Struck, tmp_path: Path) -> None:
    """All save at the border of a step and begin again from there: no step is done twice."""
    changes = {"strategy": strategy, "strategy.mesh": strategy.get("mesh", {}), "cluster.replacements": 0}

    def strike() -> None:
        wait_for(lambda: passes(tmp_path, 2) > 5, "some steps", 60)
        os.kill(pids(tmp_path, 2, 60)[1], signal.SIGTERM)

    run, told = struck(MARKED, {**changes, "train.steps": 100}, strike)
    assert "was asked to end: training goes on from step" in told
    summary = run.summary
    assert (summary["status"], summary["steps"], summary["generations"]) == ("done", 100, 2)
    starts = [journal.steps[:, 0] for journal in _workers(tmp_path) if len(journal.steps)]
    steps = sorted({int(step) for rows in starts for step in rows})
    assert steps == list(range(100))
    first = {int(step) for journal in _workers(tmp_path) if journal.generation == 1 for step in journal.steps[:, 0]}
    second = {int(step) for journal in _workers(tmp_path) if journal.generation == 2 for step in journal.steps[:, 0]}
    assert first
    assert not first & second


def test_with_fewer_where_none_is_replaced(struck: Struck, tmp_path: Path) -> None:
    def strike() -> None:
        workers = pids(tmp_path, 3, 60)
        os.kill(workers[0], signal.SIGKILL)
        exactly(tmp_path, 2)
        done = passes(tmp_path, 2)
        wait_for(lambda: passes(tmp_path, 2) > done + 50, "more steps of the others", 60)
        assert all(alive(pid) for pid in workers[1:])

    _trained(struck, tmp_path, strike, **{"cluster.min_workers": 2})


def test_with_fewer_than_the_least_it_ends_with_the_first_cause(struck: Struck, tmp_path: Path) -> None:
    changes = {**SETTINGS, "cluster.min_workers": 3}
    with pytest.raises(ClusterLost, match="was killed by SIGKILL"):
        struck(NORMALISED, changes, lambda: os.kill(pids(tmp_path, 3, 60)[2], signal.SIGKILL))


def test_refusals(make_job: MakeJob, tmp_path: Path, command: Command) -> None:
    ended = launch.train(make_job(MARKED, {"train.steps": 1}), tmp_path / "ended")
    told = command("scale", str(ended.path), "3")
    assert told.status == 2
    assert "is not being trained" in told.err
    assert "--workers 3" in told.err
    assert command("scale", str(ended.path), "many").status == 2
    assert command("scale", str(tmp_path / "none"), "2").status == 2
    for changes, words in (
        ({"strategy.mesh": {"shard": 2}, "cluster.min_workers": 1}, "its mesh divides the model (axis `shard`)"),
        ({"strategy.mesh": {"data": 2}, "cluster.min_workers": 3}, "3 is more than the 2 workers"),
        ({"strategy.mesh": {"data": 2}, "cluster.max_workers": 1}, "1 is less than the 2 workers"),
        ({"strategy.mesh": {"data": 2}, "train.batch_norm": "global", "cluster.max_workers": 3}, "batch_norm"),
    ):
        write_job(make_job, tmp_path, changes)
        told = command("train", "job.toml")
        assert told.status == 2
        assert words in told.err
        assert "cluster.m" in told.err


def _workers(folder: Path) -> list[Any]:
    from verbund.observe.journal import read

    return [journal for journal in read(folder / "run" / "journal") if journal.role == "worker"]


def _events(run: Run, name: str) -> list[dict[str, Any]]:
    from verbund.observe.journal import read

    return [event for journal in read(run.journal) for event in journal.events if event["name"] == name]
