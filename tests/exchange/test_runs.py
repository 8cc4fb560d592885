"""Runs whose islands train alone: resumed, stopped, validated, with data of their own."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conftest import MakeJob
from trained import close, parameters
from verbund.checkpoint import folder
from verbund.checkpoint.read import Checkpoint
from verbund.cluster.local import LocalCluster
from verbund.cluster.supervisor import Supervisor
from verbund.errors import ClusterLost, InputError, Interrupted
from verbund.exchange.adaptive import EXCHANGES as PERIOD
from verbund.exchange.adaptive import AdaptiveSteps
from verbund.job import parse_strategy
from verbund.observe.journal import read
from verbund.run import Run
from verbund.stage import launch
from verbund.stage.verify import lines, verify

from .test_local_sgd import MODEL

NORMALISED = """
from torch import nn

def model():
    return nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 5))
"""
EXCHANGES = [
    {"name": "local_sgd", "every": 4},
    {"name": "local_sgd", "every": 3, "adaptive": True},
    {"name": "diloco", "every": 6},
    {"name": "diloco", "every": 6, "fragments": 2, "delay": 2},
]


def name_of(value: Any) -> str:
    return "-".join(str(part) for part in value.values()) if isinstance(value, dict) else str(value)


@pytest.mark.parametrize("exchange", EXCHANGES, ids=name_of)
@pytest.mark.parametrize("broken", [7, 8, 12])
def test_resumed_as_if_never_interrupted(exchange: dict[str, Any], broken: int, run_job: Callable[..., Run]) -> None:
    """The break is at a checkpoint within the run: what follows is as it was, with the state of every island."""
    changes = {"strategy.islands": 2, "strategy.exchange": exchange, "train.steps": 16, "train.global_batch": 40}
    whole = run_job(NORMALISED, changes | {"checkpoint.every": broken, "checkpoint.keep": 9})
    again = launch.resume(_cut(whole, broken).path)
    assert again.summary["steps"] == 16
    # Bit for bit: nothing is computed in another order.
    close(again, whole, 0.0)
    assert again.summary["metrics"] == whole.summary["metrics"]


KILLED = (
    MODEL
    + """
import os, signal, time
from pathlib import Path
from torch.nn.functional import cross_entropy

HERE = Path(__file__).parent

def loss(output, targets):
    time.sleep(0.02)
    if list(HERE.glob("**/checkpoints/latest")) and not (HERE / "struck").exists():
        (HERE / "struck").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return cross_entropy(output, targets, reduction="none")
"""
)


def test_no_step_is_missing_after_a_kill(run_job: Callable[..., Run], tmp_path: Path) -> None:
    """An island's worker dies right after a checkpoint: the steps before it are in the record, and what was sent."""
    changes = {"strategy.islands": 2, "strategy.exchange": "diloco", "checkpoint.every": 8, "train.objective": None}
    with pytest.raises(ClusterLost, match="killed by SIGKILL"):
        run_job(KILLED, changes | {"train.steps": 64, "train.global_batch": 20})
    again = launch.resume(tmp_path / "run-1", {"train.steps": 17})
    assert again.summary["generations"] == 2
    assert (again.summary["steps"], again.summary["samples"]) == (17, 17 * 20 - 17)  # an epoch of 203 ends with 3
    journals = [j for j in read(again.path / "journal") if j.role == "worker"]
    assert len(journals) == 4
    assert all(j.exchange is not None for j in journals)


def _cut(run: Run, step: int) -> Run:
    """A copy of the run as it was when it had just saved this step."""
    copy = run.path.with_name(f"{run.path.name}-cut")
    shutil.copytree(run.path, copy)
    for later in (copy / "checkpoints").glob("step-*"):
        if int(later.name.partition("-")[2]) > step:
            shutil.rmtree(later)
    (copy / "summary.json").unlink()
    return Run.open(copy)


@pytest.mark.parametrize("strategy", ["islands=3,exchange=diloco", "data=2", "data=1", "islands=2,exchange=local_sgd"])
def test_goes_on_under_another_strategy(strategy: str, run_job: Callable[..., Run]) -> None:
    diloco = {"name": "diloco", "every": 6}
    run = run_job(MODEL, {"strategy.islands": 2, "strategy.exchange": diloco, "train.steps": 8})
    before = parameters(run)
    again = launch.resume(run.path, {**parse_strategy(strategy), "train.steps": 9})
    assert again.summary["steps"] == 9
    moved = sum(float((value - before[name]).abs().max()) for name, value in parameters(again).items())
    assert 0 < moved < 1, "it goes on from the common weights"
    assert any("dropped" in note for note in again.summary["notes"])


def test_validates_what_islands_have_in_common(run_job: Callable[..., Run]) -> None:
    """Between two exchanges too: what was validated is what was saved, and what `validate` finds."""
    run = run_job(
        NORMALISED,
        {
            "strategy.islands": 2,
            "strategy.exchange": {"name": "diloco", "every": 4},
            "train.steps": 10,
            "validate.every": 6,
            "checkpoint.every": 6,
            "data.validation_fraction": 0.3,
        },
    )
    curve = dict(map(tuple, run.summary["metrics"]["loss"]["curve"]))
    assert launch.validate(run.path, step=6)["metrics"]["loss"] == curve[6]
    assert launch.validate(run.path)["metrics"]["loss"] == curve[10]
    found = launch.validate(run.path, workers=3)
    assert (found["metrics"]["loss"], found["world"]) == (curve[10], 3)


def test_the_loss_is_that_of_all_islands(run_job: Callable[..., Run]) -> None:
    """The first step's is the same as in one process; every step counts all samples."""
    changes: dict[str, Any] = {"train.steps": 9}
    alone = run_job(MODEL, changes)
    run = run_job(MODEL, changes | {"strategy.islands": 3, "strategy.exchange": "local_sgd"})
    assert run.summary["loss"]["first"] == pytest.approx(alone.summary["loss"]["first"], rel=1e-6)
    assert run.summary["samples"] == alone.summary["samples"]


def test_islands_draw_from_rows_of_their_own(run_job: Callable[..., Run]) -> None:
    """Rows of one island that nobody else may use decide only what that island learns."""
    random = np.random.default_rng(3)
    x = random.normal(size=(60, 12)).astype(np.float32)
    y = np.repeat([0, 1, 2], 20)
    changes = {
        "strategy.islands": 3,
        "strategy.exchange": {"name": "local_sgd", "every": 100},
        "data.placement": "island",
        "train.steps": 6,
        "train.global_batch": 30,
        "checkpoint.every": 5,
        "train.optimizer": {"name": "sgd", "lr": 0.5},
    }
    run = run_job(MODEL, changes, x=x, y=y)
    with Checkpoint.open(folder(run.checkpoints, 5)) as checkpoint:
        biases = [checkpoint.read("exchange", f"island/{island}/values/2.bias") for island in range(3)]
    for island, bias in enumerate(biases):
        assert int(bias.argmax()) == island, "it saw its own class only"
    assert run.summary["samples"] == 180


def test_an_island_without_rows_is_refused(run_job: Callable[..., Run]) -> None:
    with pytest.raises(InputError, match=r"no sample of its own") as caught:
        run_job(
            MODEL,
            {"strategy.islands": 4, "strategy.exchange": "local_sgd", "data.placement": "island"},
            x=np.zeros((3, 12), np.float32),
            y=np.zeros(3, np.int64),
        )
    assert caught.value.where == "data.placement"


SLOW = """
import time
import torch
from torch import nn

class Slow(nn.Module):
    def forward(self, x):
        if self.training:
            time.sleep(0.02)
        return x

def model():
    return nn.Sequential(Slow(), nn.Linear(12, 5))
"""


@pytest.mark.parametrize("exchange", EXCHANGES, ids=name_of)
def test_interrupted_after_the_same_step_everywhere(
    exchange: dict[str, Any], run_job: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Islands that are at different steps stop after the same one, save it, and go on from it as if nothing was."""
    changes = {"strategy.islands": 2, "strategy.exchange": exchange | {"every": 90}, "train.steps": 120}
    whole = run_job(SLOW, changes)
    loop = Supervisor._loop

    def interrupted(self: Supervisor, selector: Any) -> None:
        threading.Timer(0.4, lambda: setattr(self._interrupts, "count", 1)).start()
        loop(self, selector)

    with monkeypatch.context() as patch:
        patch.setattr(Supervisor, "_loop", interrupted)
        begun = time.monotonic()
        with pytest.raises(Interrupted) as caught:
            run_job(SLOW, changes)
        assert time.monotonic() - begun < 20
    assert caught.value.run is not None
    run = Run.open(caught.value.run)
    assert 0 < run.summary["steps"] < 120
    close(launch.resume(run.path), whole, 0.0)


TOLD_TO_END = """
import os, signal, time
from torch import nn

class Told(nn.Module):
    passes = 0

    def forward(self, x):
        if self.training:
            self.passes += 1
            if self.passes == 9:
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3 if self.passes >= 9 else 0.01)
        return x

def model():
    return nn.Sequential(Told(), nn.Linear(12, 5))
"""


def test_interrupted_in_the_last_step(run_job: Callable[..., Run]) -> None:
    """What islands have learnt since the last exchange is in the model, also where only that is left to do."""
    changes = {"strategy.islands": 2, "strategy.exchange": {"name": "diloco", "every": 7}, "train.steps": 10}
    whole = run_job(TOLD_TO_END.replace("passes == 9", "passes == 99"), changes)
    try:
        run = run_job(TOLD_TO_END, changes)
    except Interrupted as interrupted:
        run = launch.resume(interrupted.run or Path())
    assert run.summary["steps"] == 10
    close(run, whole, 0.0)


def test_ends_where_it_was_interrupted(run_job: Callable[..., Run]) -> None:
    """A resumed run that is to end after the steps done still has an exchange to make."""
    changes = {"strategy.islands": 2, "strategy.exchange": {"name": "diloco", "every": 7}}
    whole = run_job(MODEL, changes | {"train.steps": 10})
    longer = run_job(MODEL, changes | {"train.steps": 12, "checkpoint.every": 10, "checkpoint.keep": 9})
    close(launch.resume(_cut(longer, 10).path, {"train.steps": 10}), whole, 0.0)


IDLE = """
from torch import nn

def model():
    return nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Linear(16, 5))
"""


def test_an_island_without_samples_is_saved_too(run_job: Callable[..., Run]) -> None:
    """The first of three islands has no group of samples: it has no optimiser's state, the others have."""
    changes = {
        "strategy.islands": 3,
        "strategy.exchange": {"name": "local_sgd", "every": 4},
        "train.group": 20,
        "train.global_batch": 40,
        "train.steps": 9,
        "checkpoint.every": 6,
        "checkpoint.keep": 9,
        "train.optimizer": "adamw",
    }
    whole = run_job(IDLE, changes)
    assert whole.summary["warnings"] == []
    close(launch.resume(_cut(whole, 6).path), whole, 0.0)


def test_every_island_keeps_its_loss_scale(run_job: Callable[..., Run]) -> None:
    """An island's gradients may overflow where another's do not."""
    random = np.random.default_rng(3)
    x = random.normal(size=(60, 12)).astype(np.float32)
    x[30:] *= 30.0
    changes = {
        "strategy.islands": 2,
        "strategy.exchange": {"name": "local_sgd", "every": 4, "adaptive": True},
        "data.placement": "island",
        "train.precision": "fp16",
        "train.loss_scale": 2.0**20,
        "train.global_batch": 20,
        "train.steps": 20,
        "checkpoint.every": 9,
        "checkpoint.keep": 9,
    }
    whole = run_job(MODEL, changes, x=x, y=random.integers(0, 5, 60))
    with Checkpoint.open(folder(whole.checkpoints, 9)) as checkpoint:
        scales = [checkpoint.read("exchange", f"island/{island}/loss_scale")[0] for island in range(2)]
    assert scales[0] != scales[1]
    close(launch.resume(_cut(whole, 9).path), whole, 0.0)


def test_time_ends_all_islands(run_job: Callable[..., Run]) -> None:
    run = run_job(
        SLOW,
        {
            "strategy.islands": 2,
            "strategy.exchange": {"name": "diloco", "every": 100},
            "train.steps": None,
            "train.seconds": 0.5,
        },
    )
    assert run.summary["ended_by"] == "seconds"
    assert 0 < run.summary["steps"] < 100
    assert run.summary["metrics"] == {} or run.summary["status"] == "done"


def test_fewer_steps_as_the_loss_falls() -> None:
    adaptive = AdaptiveSteps(16)
    found = []
    for loss in (4.0, 2.0, 1.0, 2.0, 0.01, 0.0):
        for _ in range(PERIOD):
            adaptive.observe(10 * loss, 10.0)
        found.append(adaptive.steps)
    # ⌈16·√(F/4)⌉ for F = 4 (the reference), 2, 1, 2 (never more again), 0.01, 0
    assert found == [16, 12, 8, 8, 1, 1]


def test_drawn_apart_by_what_they_see(run_job: Callable[..., Run]) -> None:
    """A check of the tests above: islands do differ between exchanges."""
    run = run_job(
        MODEL,
        {"strategy.islands": 2, "strategy.exchange": "local_sgd", "checkpoint.every": 5, "train.steps": 8},
    )
    with Checkpoint.open(folder(run.checkpoints, 5)) as checkpoint:
        one, other = (checkpoint.read("exchange", f"island/{i}/values/0.weight") for i in range(2))
    assert not torch.equal(one, other)


COMPRESSED = [
    "fp16",
    "bf16",
    "int8",
    "int4",
    "sign",
    {"name": "top_k", "density": 0.2},
    {"name": "power_sgd", "rank": 2},
]


@pytest.mark.parametrize("compression", COMPRESSED, ids=name_of)
def test_compressed_differences(compression: Any, run_job: Callable[..., Run]) -> None:
    """A little off from what is exact, by less than training moved; with fewer bytes; resumed bit for bit."""
    changes = {"strategy.islands": 2, "train.steps": 16, "train.global_batch": 40, "train.optimizer.lr": 0.01}
    exact = run_job(NORMALISED, changes | {"strategy.exchange": {"name": "diloco", "every": 2}})
    settings = compression if isinstance(compression, dict) else {"name": compression}
    small = {"name": "diloco", "every": 2, "compression": {**settings, "warmup": 4}}
    run = run_job(NORMALISED, changes | {"strategy.exchange": small, "checkpoint.every": 9, "checkpoint.keep": 9})
    a, b = parameters(exact), parameters(run)
    start = parameters(run_job(NORMALISED, changes | {"train.steps": 1, "train.optimizer.lr": 1e-9}))
    moved = sum(float((a[n] - start[n]).square().sum()) for n in a)
    off = sum(float((a[n] - b[n]).square().sum()) for n in a)
    assert 0 < off < 0.5 * moved
    found = run.summary["exchange"]
    assert found["exchanges"] == 8
    assert found["ratio"] > 1.1
    assert exact.summary["exchange"]["ratio"] == 1.0
    # 2 islands: an all-reduce sends each value once, 309 parameters and running statistics of 32, and two numbers each.
    assert exact.summary["exchange"]["bytes_with"] == 2 * 8 * 4 * (12 * 16 + 16 + 32 + 85 + 2 + 32 + 2)
    close(launch.resume(_cut(run, 9).path), run, 0.0)


def test_verify_leaves_the_exchange_out(make_job: MakeJob, shared_cluster: LocalCluster) -> None:
    """What islands compute is compared; that they train alone is not what one process does."""
    found = verify(make_job(MODEL, {"strategy.islands": 2, "strategy.exchange": "diloco"}), steps=2)
    assert found["passed"]
    assert found["strategy"] == "islands=2"
    assert any("the exchange `diloco` islands train alone" in line for line in lines(found))


CHANGED = [
    {"fragments": 1, "delay": 0},
    {"fragments": 3},
    {"fragments": 4, "delay": 1},
    {"delay": 0},
    {"every": 4},
    {"outer_momentum": 0.0},
    {"compression": "int8"},
    {"compression": {"name": "power_sgd", "rank": 1, "minimum_ratio": 1.0}, "mixing": 0.2},
    {"fragments": 1, "delay": 0, "adaptive": True},
]


@pytest.mark.parametrize("changed", CHANGED, ids=name_of)
@pytest.mark.parametrize("back", [False, True])
def test_resumed_with_other_settings_of_the_exchange(
    changed: dict[str, Any], back: bool, run_job: Callable[..., Run]
) -> None:
    """Whatever changed, the run goes on from what the islands have in common at least."""
    settings = {"name": "diloco", "every": 6, "fragments": 2, "delay": 3}
    first, then = settings, settings | changed
    if back:
        first, then = then, first
    changes = {"strategy.islands": 2, "strategy.exchange": first, "train.global_batch": 40}
    run = run_job(NORMALISED, changes | {"train.steps": 16, "checkpoint.every": 8, "checkpoint.keep": 9})
    cut = _cut(run, 8)
    again = launch.resume(cut.path, {"strategy.exchange": then})
    assert again.summary["steps"] == 16
    told = any("dropped" in note or "begins anew" in note for note in again.summary["notes"])
    # With one fragment all have been exchanged after the same step: then it does not matter how many there are now.
    assert told == ("outer_momentum" in changed or ("fragments" in changed and first["fragments"] > 1))


def test_an_axis_of_one_worker_is_none(run_job: Callable[..., Run]) -> None:
    """Named with one worker or not named at all, an axis divides nothing: the run goes on bit for bit."""
    settings = {"name": "diloco", "every": 6, "fragments": 2, "delay": 3}
    changes = {"strategy.islands": 2, "strategy.exchange": settings, "train.steps": 12}
    whole = run_job(NORMALISED, changes | {"checkpoint.every": 8, "checkpoint.keep": 9})
    again = launch.resume(_cut(whole, 8).path, {"strategy.mesh": {"tensor": 1, "data": 1}})
    assert not any("dropped" in note for note in again.summary["notes"])
    close(again, whole, 0.0)


def test_what_the_report_counts_of_islands(run_job: Callable[..., Run]) -> None:
    """What they exchange through memory, and what they hold for exchanges."""
    changes = {"strategy.islands": 2, "train.steps": 4, "strategy.exchange": {"name": "diloco", "every": 2}}
    run = run_job(MODEL, changes | {"strategy.exchange.compression": "int8"})
    plain = run_job(MODEL, changes)
    if not any("memory" in note for note in plain.summary["notes"]):  # else gloo did it
        assert plain.summary["bytes"]["shared"] >= plain.summary["exchange"]["bytes_with"]
    held = plain.summary["memory_promise"]["workers"]["worker 0"]["held"]
    # The common values, their differences with two numbers, and the moments.
    assert held["exchange"] == 3 * held["parameters"] + 8
    compressed = run.summary["memory_promise"]["workers"]["worker 0"]["held"]
    assert compressed["exchange"] == held["exchange"] + held["parameters"]


def test_notes_of_exchanges(run_job: Callable[..., Run]) -> None:
    """What is inexact is told, and what has no effect."""

    def notes(changes: dict[str, Any]) -> str:
        return "\n".join(run_job(MODEL, {"train.steps": 2, **changes}).summary["notes"])

    islands = {"strategy.islands": 2, "strategy.exchange": {"name": "local_sgd", "compression": "sign"}}
    found = notes(islands)
    assert "Islands train alone (`local_sgd`)" in found
    assert "Nothing travels as `sign`: the first 100 steps are without compression" in found
    assert "Differences travel as `int8`" in notes({**islands, "strategy.exchange.compression": "int8"})
    one = notes({"strategy.exchange": "local_sgd", "data.placement": "island"})
    assert "has one island and nobody to exchange with: it does nothing" in one
    assert "`data.placement` has no effect with one island" in one
    assert "only its outer optimiser steps" in notes({"strategy.exchange": "diloco"})
    assert "Nothing travels as `top_k`" in notes({"strategy.mesh": {"data": 2}, "strategy.compression": "top_k"})


def test_verify_says_that_it_compares_no_rounds(make_job: MakeJob, shared_cluster: LocalCluster) -> None:
    exchange = {"name": "federated", "clients": 4}
    found = verify(make_job(MODEL, {"strategy.exchange": exchange, "train.epochs": None, "train.steps": 1}), steps=1)
    assert any("`federated` clients train alone, and `verify` compares nothing" in line for line in lines(found))
