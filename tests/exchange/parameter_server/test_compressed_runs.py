"""Whole runs whose pushes are compressed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from conftest import losses
from trained import close, newest, parameters
from verbund.errors import JobError
from verbund.job import Job
from verbund.run import Run
from verbund.stage import launch

RunJob = Callable[..., Run]
SERVED = {"name": "parameter_server", "log": False}
DIGITS = """
from torch import nn

def model():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
"""


def digits() -> dict[str, Any]:
    found = load_digits()
    return {"x": (found.data / 16.0).astype(np.float32), "y": found.target}


def test_half_precision_is_within_its_rounding(run_job: RunJob) -> None:
    """Steps are those of one process but for what float16 rounds, a 2048th of a value, and that comes later."""
    changes = {"train.steps": 8, "train.optimizer": {"name": "sgd", "lr": 0.1}}
    alone = run_job(changes=changes)
    served = {"strategy.islands": 2, "strategy.exchange": {**SERVED, "compression": "fp16"}}
    run = run_job(changes={**changes, **served})
    np.testing.assert_allclose(losses(run), losses(alone), rtol=2e-5)
    theirs, differs = parameters(alone), 0.0
    for name, values in parameters(run).items():
        torch.testing.assert_close(values, theirs[name], rtol=0.0, atol=2e-5)
        differs = max(differs, float((values - theirs[name]).abs().max()))
    assert differs > 1e-7, "nothing was rounded"
    found = run.summary["compression"]
    sizes = [(192, 16 + 384), (16, 16 + 32), (80, 16 + 160), (5, 20)]  # the last bias would only grow
    assert found["bytes_without"] == 2 * 8 * sum(4 * count for count, _ in sizes)
    assert found["bytes_with"] == 2 * 8 * sum(size for _, size in sizes)
    assert (found["method"], found["steps"]) == ("fp16", 8)
    assert sum(server["bytes"] for server in run.summary["servers"]["per_server"].values()) == found["bytes_with"]


def test_they_learn_as_much(run_job: RunJob) -> None:
    changes = {
        "train.steps": 120,
        "train.global_batch": 64,
        "train.optimizer": {"name": "sgd", "lr": 0.5},
        "data.validation_fraction": 0.3,
        "validate.metrics": ["accuracy"],
        "strategy.islands": 2,
    }
    found = {}
    for name, compression, more in [
        ("none", "none", {}),
        ("int8", "int8", {}),
        ("top_k", {"name": "top_k", "density": 0.05, "warmup": 0}, {}),
        ("sign", {"name": "sign", "warmup": 20}, {"consistency": "asynchronous"}),
    ]:
        exchange = {**SERVED, "compression": compression, **more}
        run = run_job(DIGITS, {**changes, "strategy.exchange": exchange}, **digits())
        found[name] = float(run.summary["metrics"]["accuracy"]["last"])
        if name == "top_k":
            assert run.summary["compression"]["ratio"] > 7
            assert run.summary["compression"]["relative_error"]["estimate"] > 0.1
    assert found["none"] > 0.9
    assert all(accuracy > found["none"] - 0.03 for accuracy in found.values()), found


def test_what_was_left_out_goes_on_after_a_break(run_job: RunJob) -> None:
    """With the same islands to the same bits; under a mesh that compresses too its workers share it."""
    top_k = {"name": "top_k", "density": 0.05, "warmup": 2}
    changes = {
        "train.steps": 10,
        "strategy.islands": 2,
        "strategy.exchange": {**SERVED, "log": True, "servers": 2, "compression": top_k},
        "data.validation_fraction": 0.2,
        "validate.every": 3,
    }
    unbroken = run_job(changes=changes)
    broken = run_job(changes={**changes, "train.steps": 6})
    with newest(broken) as saved:
        kept = {name: saved.read("exchange", name) for name in saved.names("exchange")}
    assert {name.removeprefix("compression/error/") for name in kept} == {"0.weight", "2.weight", "0.bias"}
    assert all(values.shape[0] == 2 and values[0].any() and values[1].any() for values in kept.values())
    resumed = launch.resume(broken.path, {"train.steps": 10})
    close(resumed, unbroken, 0.0)
    with newest(resumed) as ours, newest(unbroken) as theirs:
        for name in kept:
            assert torch.equal(ours.read("exchange", name), theirs.read("exchange", name)), name
    mesh = {"strategy.islands": 1, "strategy.exchange": "all_reduce", "strategy.mesh": {"data": 2}}
    other = launch.resume(resumed.path, {**mesh, "strategy.compression": top_k, "train.steps": 12})
    assert other.summary["steps"] == 12
    assert not any("dropped" in note for note in other.summary.get("notes", []))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"strategy.exchange": {**SERVED, "compression": "power_sgd"}}, "each push travels by itself"),
        ({"strategy.exchange": SERVED, "strategy.compression": "int8"}, "`strategy.exchange.compression`"),
        ({"strategy.exchange": {"name": "all_reduce", "compression": "int8"}}, "parameter_server"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], said: str, make_job: Callable[..., Job]) -> None:
    with pytest.raises(JobError, match=said):
        make_job(changes={"strategy.islands": 2, **settings})
