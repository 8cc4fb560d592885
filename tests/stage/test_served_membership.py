"""Islands come and go while a training with parameter servers goes on: no ticket is lost, none is done twice."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import Beside, Command, MakeJob, Struck, and_end, wait_for
from processes import MARKED, alive, exactly, gone, scaled, write_job
from verbund.errors import InputError, Interrupted
from verbund.run import Run
from verbund.stage import launch
from verbund.stage.scale import scale

SERVED: dict[str, Any] = {
    "cluster.max_workers": 4,
    "cluster.threads": 1,
    "strategy.islands": 2,
    "strategy.exchange": {"name": "parameter_server", "consistency": "asynchronous"},
    "train.steps": 100_000,
    "train.optimizer": {"name": "sgd", "lr": 1e-3},
    "data.validation_fraction": 0.2,
    "validate.every": 50,
    "checkpoint.every": 50,
    "checkpoint.keep": 1,
}


def _trained(struck: Struck, folder: Path, strike: Callable[[], object], **changes: Any) -> Run:
    """Ctrl-C once that is done, and whether every ticket was done just once."""
    with pytest.raises(Interrupted):
        struck(MARKED, {**SERVED, **changes}, and_end(strike))
    run = Run.open(folder / "run")
    served = run.summary["servers"]
    blocks = 4  # two layers' weights and biases
    assert sum(each["applied"] for each in served["per_server"].values()) == run.summary["steps"] * blocks
    assert served["late"] == served["skipped"] == 0
    return run


def test_islands_come_and_go(struck: Struck, tmp_path: Path) -> None:
    def strike() -> None:
        first = exactly(tmp_path, 2)
        assert scaled(tmp_path, 4)["workers"] == 4
        four = exactly(tmp_path, 4)
        assert set(first) < set(four)
        os.kill(next(pid for pid in four if pid not in first), signal.SIGKILL)
        assert set(exactly(tmp_path, 4)) > set(first)  # who came later is replaced like any other
        answer = scaled(tmp_path, 1)
        assert (answer["exit"], answer["former"], answer["workers"]) == (0, 4, 1)
        (left,) = exactly(tmp_path, 1)
        assert left in first
        assert gone([pid for pid in four if pid != left], 10)
        assert scaled(tmp_path, 2)["workers"] == 2
        exactly(tmp_path, 2)

    run = _trained(struck, tmp_path, strike)
    assert [workers for _, workers in run.summary["membership"]["over_time"]] == [2, 4, 1, 2]
    assert len(run.summary["membership"]["replacements"]) == 1


def test_who_comes_after_the_first_checkpoint_was_removed(struck: Struck, beside: Beside, tmp_path: Path) -> None:
    """What a resumed run began with may be gone when a process takes another's place, or an island comes."""
    without = {"data.validation_fraction": 0.0, "validate.every": "epoch", "checkpoint.every": 20}
    checkpoints = tmp_path / "run" / "checkpoints"

    def strike() -> None:
        exactly(tmp_path, 2)
        wait_for(lambda: list(checkpoints.glob("step-*")), "a checkpoint", 60)

    _trained(struck, tmp_path, strike, **without)  # the best one is kept
    (source,) = checkpoints.glob("step-*")

    def strike_again() -> None:
        two = exactly(tmp_path, 2)
        wait_for(lambda: not source.exists(), "a newer checkpoint", 60)
        os.kill(two[0], signal.SIGKILL)
        assert scaled(tmp_path, 3)["workers"] == 3
        wait_for(lambda: not alive(two[0]), "its end", 10)
        assert len(exactly(tmp_path, 3)) == 3

    with pytest.raises(Interrupted):
        beside(and_end(strike_again), lambda: launch.resume(tmp_path / "run"))


@pytest.mark.parametrize(
    ("changes", "workers", "said"),
    [
        (
            {"strategy.exchange": {"name": "parameter_server"}, "cluster.max_workers": None},
            3,
            "its islands share every global batch",
        ),
        ({"strategy.mesh": {"data": 2}}, 3, "each island of this run has 2"),
        ({}, 5, "this run takes 1 to 4"),
    ],
)
def test_what_cannot_be_is_refused(
    changes: dict[str, Any],
    workers: int,
    said: str,
    run_job: Callable[..., Run],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = run_job(changes={**SERVED, "train.steps": 2, **changes})
    monkeypatch.setattr(Run, "being_trained", True)
    with pytest.raises(InputError, match=said):
        scale(run.path, workers)


def test_limits_that_cannot_be_kept_are_refused_at_once(command: Command, make_job: MakeJob, tmp_path: Path) -> None:
    write_job(make_job, tmp_path, {**SERVED, "strategy.exchange": {"name": "parameter_server"}})
    ended = command("train", "job.toml")
    assert ended.status == 2
    assert "cluster.max_workers: the number of workers cannot change" in ended.err
