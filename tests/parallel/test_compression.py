"""Compressed training as a whole."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from conftest import MakeJob, losses
from trained import newest
from verbund.cluster.local import LocalCluster
from verbund.errors import RunFailed
from verbund.job import parse_strategy
from verbund.run import Run
from verbund.stage import launch
from verbund.stage.verify import lines, verify

RunJob = Callable[..., Run]
METHODS = ["fp16", "bf16", "int8", "int4", "sign", "top_k", "power_sgd"]

# Wide enough for matrices that shrink; a scalar, an empty parameter, one that no sample uses, one that is frozen, and
# one that only samples of one worker use.
ODD = """
import torch
from torch import nn

class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(12, 64)
        self.second = nn.Linear(64, 64)
        self.last = nn.Linear(64, 5)
        self.scalar = nn.Parameter(torch.tensor(1.0))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.unused = nn.Parameter(torch.ones(40, 30))
        self.frozen = nn.Parameter(torch.ones(64), requires_grad=False)

    def forward(self, x):
        hidden = torch.relu(self.second(torch.relu(self.first(x)))) * self.frozen
        return self.last(hidden) * self.scalar + self.empty.sum()

def model():
    return Odd()
"""


BFLOAT16 = """
def inputs(batch):
    return batch["x"].bfloat16()
"""


def settings(name: str, workers: int = 2, **more: Any) -> dict[str, Any]:
    method: dict[str, Any] = {"name": name, "warmup": 0}
    if name == "top_k":
        method["density"] = 0.1
    if name == "power_sgd":
        method["rank"] = 2
    return {
        "strategy.mesh": {"data": workers},
        "strategy.compression": {**method, **more},
        "train.optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9},
        "train.check_replicas": 1,
        "train.global_batch": 40,
        "train.steps": 8,
    }


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("name", METHODS)
def test_near_the_uncompressed(name: str, workers: int, run_job: RunJob) -> None:
    """Also: replicas are compared after every step, and odd parameters are in order."""
    exact = run_job(ODD, settings("none", 1))
    run = run_job(ODD, settings(name, workers))
    if workers == 1:
        assert losses(run) == losses(exact)
        return
    assert losses(run)[0] == pytest.approx(losses(exact)[0], rel=1e-5)
    tight = name in ("fp16", "bf16", "int8")
    assert losses(run)[-1] == pytest.approx(losses(exact)[-1], rel=0.01 if tight else 0.15)
    saved = newest(run)
    assert torch.equal(saved.read("parameters", "unused"), torch.ones(40, 30))
    kept = [n for n in saved.names("exchange") if n.startswith("compression/error/")]
    assert ("compression/error/scalar" in kept) == (name != "power_sgd")
    assert saved.shape("exchange", "compression/error/second.weight") == (workers, 64, 64)
    assert not any("frozen" in n for n in kept)
    figures = run.summary["compression"]
    assert figures["method"] == name
    assert figures["steps"] == 8
    assert figures["ratio"] > (1.5 if name != "power_sgd" else 1.2)
    assert 0 < figures["relative_error"]["estimate"] < (0.03 if tight else 1.0)


@pytest.mark.parametrize("name", METHODS)
def test_a_resumed_run_is_the_uninterrupted_one(name: str, run_job: RunJob) -> None:
    whole = run_job(ODD, settings(name))
    run = run_job(ODD, {**settings(name), "train.steps": 5})
    run = launch.resume(run.path, {"train.steps": 8})
    assert losses(run) == losses(whole)
    a, b = newest(run), newest(whole)
    for kind in ("parameters", "exchange"):
        assert sorted(a.names(kind)) == sorted(b.names(kind))
        for tensor in a.names(kind):
            assert torch.equal(a.read(kind, tensor), b.read(kind, tensor)), tensor


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (2, 1)])
def test_other_workers_share_what_was_not_sent(before: int, after: int, run_job: RunJob) -> None:
    run = run_job(ODD, {**settings("top_k", before), "train.steps": 4})
    errors = {n: newest(run).read("exchange", n) for n in newest(run).names("exchange")}
    # No step is taken with a rate of 0, but errors go on; so none is done at all.
    resumed = launch.resume(run.path, {"strategy.mesh": {"data": after}, "train.steps": 5})
    notes = " ".join(resumed.summary["notes"])
    assert ("shared out among" in notes) == (after > 1)
    assert ("is dropped" in notes) == (after == 1)
    assert losses(resumed)[-1] < losses(resumed)[0]
    assert errors


def test_another_method_takes_over_what_was_not_sent(run_job: RunJob) -> None:
    run = run_job(ODD, {**settings("top_k"), "train.steps": 4})
    run = launch.resume(run.path, {"strategy.compression": "int8", "train.steps": 6})
    assert not any("dropped" in note for note in run.summary["notes"])
    run = launch.resume(run.path, {"strategy.compression": "power_sgd", "train.steps": 8})
    assert any("is dropped of" in note for note in run.summary["notes"])
    run = launch.resume(run.path, {"strategy.compression": "none", "train.steps": 10})
    assert any("is dropped, as they are not compressed now" in note for note in run.summary["notes"])


def test_warm_up_is_uncompressed(run_job: RunJob) -> None:
    exact = run_job(ODD, settings("none"))
    run = run_job(ODD, settings("sign", warmup=5))
    assert losses(run)[:6] == losses(exact)[:6]
    assert losses(run)[6:] != losses(exact)[6:]
    assert run.summary["compression"]["steps"] == 3


@pytest.mark.parametrize("name", METHODS)
def test_gradients_that_are_not_finite_surface(name: str, run_job: RunJob) -> None:
    bad = (
        ODD.replace("* self.scalar", "* Bad.apply(self.scalar)")
        + """
class Bad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("inf")
"""
    )
    with pytest.raises(RunFailed, match="loss became nan"):
        run_job(bad, settings(name))


@pytest.mark.parametrize("name", ["int8", "top_k", "power_sgd"])
@pytest.mark.parametrize(
    "changes",
    [
        {"train.clip_norm": 0.5},
        {"train.micro_batch": 7},
        {"train.precision": "bf16"},
        {"train.precision": "fp16", "train.loss_scale": 2.0**40},
        {"train.precision": "fp64"},
        {"train.global_batch": 37},
    ],
    ids=str,
)
def test_other_settings(name: str, changes: dict[str, Any], run_job: RunJob) -> None:
    exact = run_job(ODD, {**settings("none"), **changes})
    run = run_job(ODD, {**settings(name), **changes})
    assert all(math.isfinite(loss) for loss in losses(run))
    assert losses(run)[-1] == pytest.approx(losses(exact)[-1], rel=0.15)


@pytest.mark.parametrize("name", ["int8", "top_k", "power_sgd"])
def test_bfloat16_parameters(name: str, run_job: RunJob) -> None:
    task = ODD.replace("return Odd()", "return Odd().bfloat16()") + BFLOAT16
    exact = run_job(task, settings("none"))
    run = run_job(task, settings(name))
    assert losses(run)[-1] == pytest.approx(losses(exact)[-1], rel=0.2)
    assert newest(run).dtype("exchange", "compression/error/second.weight") == torch.float32


@pytest.mark.parametrize("mesh", [{"data": 2, "tensor": 2}, {"data": 2, "pipeline": 2}])
@pytest.mark.parametrize("name", ["int8", "top_k", "power_sgd"])
def test_divided_models(name: str, mesh: dict[str, int], run_job: RunJob) -> None:
    task = """
from torch import nn

def model():
    return nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))
"""
    exact = run_job(task, settings("none"))
    run = run_job(task, {**settings(name), "strategy.mesh": mesh})
    assert losses(run)[-1] == pytest.approx(losses(exact)[-1], rel=0.15)
    assert newest(run).shape("exchange", "compression/error/2.weight") == (2, 64, 64)
    resumed = launch.resume(run.path, {"strategy.mesh": {"data": 2}, "train.steps": 10})
    assert losses(resumed)[-1] < losses(resumed)[0]


@pytest.mark.parametrize("mesh", [{"shard": 2}, {"shard": 2, "data": 2}], ids=str)
@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_casts_under_shard(name: str, mesh: dict[str, int], run_job: RunJob) -> None:
    exact = run_job(ODD, settings("none"))
    run = run_job(ODD, {**settings(name, warmup=2), "strategy.mesh": mesh})
    assert losses(run)[:3] == pytest.approx(losses(exact)[:3], rel=1e-5)
    assert losses(run)[-1] == pytest.approx(losses(exact)[-1], rel=0.02)
    assert losses(run)[3:] != losses(exact)[3:]
    assert 1.3 < run.summary["compression"]["ratio"] < 2
    resumed = launch.resume(run.path, {"train.steps": 10})
    assert len(losses(resumed)) == 10


def test_the_report_has_a_section(run_job: RunJob) -> None:
    run = run_job(ODD, settings("int8"))
    page = (run.path / "report.html").read_text()
    assert "Compressed gradients" in page
    assert "Compressed gradients" not in (run_job(ODD, settings("none")).path / "report.html").read_text()


def test_verify_leaves_it_out_and_says_so(make_job: MakeJob, shared_cluster: LocalCluster) -> None:
    found = verify(make_job(ODD, parse_strategy("data=2,compression=sign")), steps=1)
    assert found["passed"]
    assert any("compression `sign` is inexact" in line for line in lines(found))


def test_notes_say_what_it_means(run_job: RunJob) -> None:
    two = run_job(ODD, settings("int8"))
    assert any("`int8`, which is inexact" in note for note in two.summary["notes"])
    one = run_job(ODD, settings("int8", 1))
    assert any("no effect without the axis `data`" in note for note in one.summary["notes"])
    assert one.summary["compression"]["ratio"] is None


@pytest.mark.parametrize(("mesh", "exchange"), [({}, "all_reduce"), ({"data": 2}, {"name": "local_sgd", "every": 3})])
@pytest.mark.parametrize("name", ["int8", "power_sgd"])
def test_islands(name: str, mesh: dict[str, int], exchange: Any, run_job: RunJob) -> None:
    """Gradients that islands add up, and those that each adds up for itself."""
    changes = {**settings(name), "strategy.mesh": mesh, "strategy.islands": 2, "strategy.exchange": exchange}
    whole = run_job(ODD, changes)
    assert whole.summary["compression"]["steps"] == 8
    run = run_job(ODD, {**changes, "train.steps": 5})
    run = launch.resume(run.path, {"train.steps": 8})
    if exchange == "all_reduce":
        assert losses(run) == losses(whole)
    else:  # the end of a training is an exchange more
        assert losses(run)[:5] == losses(whole)[:5]
    workers = 4 if mesh else 2
    assert newest(run).shape("exchange", "compression/error/second.weight") == (workers, 64, 64)


def test_verify_leaves_out_exchanges(make_job: MakeJob) -> None:
    strategy = "islands=2,exchange=local_sgd,exchange.every=4,exchange.compression=int8"
    found = verify(make_job(ODD, parse_strategy(strategy)), steps=1)
    assert found["passed"]
    assert found["strategy"] == "islands=2"
    assert found["left_out"][0].startswith("under the exchange `local_sgd` islands train alone")
