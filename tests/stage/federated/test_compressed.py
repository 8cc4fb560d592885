"""Updates in fewer bytes: what is left out comes later, survives kills, and is measured."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conftest import MLP, MakeJob, wait_for
from federation import federation
from stage.federated.test_kills import CHANGES, NAMES
from storm import Federation
from trained import close, newest
from verbund.errors import InputError, JobError
from verbund.exchange.federated.compressed import ERROR, UpdateCompression
from verbund.job import Exchange
from verbund.run import Run
from verbund.stage import launch
from verbund.stage.federated import preflight
from verbund.stage.federated.home import JobState
from verbund.stage.federated.preflight import examine

RunJob = Callable[..., Run]
METHODS = [
    "fp16",
    "bf16",
    "int8",
    {"name": "int4", "rounding": "stochastic"},
    "sign",
    {"name": "top_k", "density": 0.1},
]
WIDE = """
from torch import nn

def model():
    return nn.Sequential(nn.Linear(12, 400), nn.ReLU(), nn.Linear(400, 5))
"""


def compression(method: Any, **exchange: Any) -> UpdateCompression:
    settings = Exchange.model_validate({"name": "federated", "clients": 4, "compression": method, **exchange})
    return UpdateCompression(settings, ["running"], seed=0)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_what_is_left_out_comes_later(method: Any) -> None:
    """Σ sent + what is kept = Σ differences, per parameter; what is not a parameter travels as it is."""
    random = torch.Generator().manual_seed(0)
    found = compression(method)
    memory: dict[str, torch.Tensor] = {}
    total, sent = torch.zeros(30, 40, dtype=torch.float64), torch.zeros(30, 40, dtype=torch.float64)
    for round_ in range(12):
        difference = {"w": torch.randn(30, 40, generator=random), "running": torch.randn(3, generator=random)}
        coded = found.encode(difference, memory, 7, round_)
        decoded = found.decode(coded.messages, difference)
        assert torch.equal(decoded["w"], coded.difference["w"]), "the client reckons with what the server has"
        assert torch.equal(coded.difference["running"], difference["running"])
        assert sum(m.nbytes for m in coded.messages.values()) + 12 == found.bytes_of(difference)
        total += difference["w"].double()
        sent += coded.difference["w"].double()
        memory = coded.kept
        assert list(memory) == [f"{ERROR}w"]
    torch.testing.assert_close(sent + memory[f"{ERROR}w"].double(), total, rtol=0, atol=1e-4)
    assert float(memory[f"{ERROR}w"].abs().max()) > 0, "it is not exact"
    without = compression(method, error_feedback=False).encode({"w": torch.ones(4)}, memory, 7, 0)
    assert not without.kept


def test_messages_of_others_are_checked() -> None:
    found = compression({"name": "top_k", "density": 0.1})
    like = {"w": torch.zeros(50)}
    good = found.encode({"w": torch.randn(50)}, {}, 0, 0).messages["w"]
    beyond = good.clone()
    beyond[:4] = torch.tensor([50, 0, 0, 0], dtype=torch.uint8)
    below = good.clone()
    below[:4] = 255
    for message in (good[:-1], good.float(), beyond, below):
        with pytest.raises(InputError, match="message of `w`"):
            found.decode({"w": message}, like)
    for name in ("running", "unknown"):
        with pytest.raises(InputError, match="not compressed in this job"):
            found.decode({name: good}, {**like, "running": torch.zeros(50)})


def settings(method: Any, **exchange: Any) -> dict[str, Any]:
    return {
        "strategy.exchange": {"name": "federated", "clients": 6, "cohort": 3, "compression": method, **exchange},
        "train.optimizer": {"name": "sgd", "lr": 0.2},
        "train.global_batch": 10,
    }


def test_a_simulation_has_fewer_bytes_and_goes_on(run_job: RunJob) -> None:
    """int8 is near what is not compressed; top_k with error feedback resumes, and two workers do the same."""
    plain = run_job(WIDE, settings("none"))
    close(plain, run_job(WIDE, settings("int8")), 2e-3)
    how = settings({"name": "top_k", "density": 0.05})
    whole = run_job(WIDE, {**how, "train.steps": 4, "strategy.mesh": {"data": 2}})
    part = run_job(WIDE, {**how, "train.steps": 2})
    part = launch.resume(part.path, {"train.steps": 4})
    close(whole, part, 1e-6)
    with newest(part) as saved:
        assert any(f"/{ERROR}0.weight" in name for name in saved.names("exchange"))
    sent = {run.path.name: run.summary["rounds"]["bytes"]["up"] / run.summary["steps"] for run in (plain, whole)}
    assert sent[plain.path.name] / sent[whole.path.name] == pytest.approx(10.0, rel=0.05), "1 of 20, with its place"


@pytest.mark.usefixtures("one_thread")
def test_feedback_matters(tmp_path: Path) -> None:
    """Least squares by one value of a hundred at a time: with feedback it gets there, without it does not."""
    random = np.random.default_rng(0)
    x = random.normal(size=(64, 12)).astype(np.float32)
    y = (x @ random.normal(size=(12, 1))).astype(np.float32)
    task = "from torch import nn\n\ndef model():\n    return nn.Linear(12, 1)\n"
    losses = []
    for feedback in (True, False):
        how = {"clients": 4, "compression": {"name": "top_k", "density": 0.01}, "error_feedback": feedback}
        folder = tmp_path / str(feedback)
        folder.mkdir()
        train = {"objective": "mean_squared_error", "global_batch": 16, "optimizer": {"name": "sgd", "lr": 0.05}}
        from verbund.stage.federated.clients import Compressing, Resident

        found = federation(
            folder,
            task,
            how,
            train,
            lambda local, parts: Compressing(Resident(local, parts), local.compression),  # type: ignore[arg-type]
            x=x,
            y=y,
        )
        losses.append(found.play(60)[-1].loss / 64)
    assert losses[0] < 0.5 * losses[1]


def test_feedback_without_room_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_job: MakeJob) -> None:
    random = np.random.default_rng(0)
    columns = {"x": random.normal(size=(40, 12)).astype(np.float32), "y": random.integers(0, 5, 40)}
    found = federation(tmp_path, MLP, {"clients": 4, "compression": "int8"}, {"global_batch": 16}, **columns)
    examine(found.job, found.local.replica, found.parts)
    monkeypatch.setattr(preflight, "available_bytes", lambda: 4 * 4 * 293 * 2 - 1)  # 293 parameters
    with pytest.raises(InputError, match="what 4 clients keep of their updates") as caught:
        examine(found.job, found.local.replica, found.parts)
    assert caught.value.where == "strategy.exchange.error_feedback"


def test_real_clients_keep_their_feedback_through_kills(
    tmp_path: Path, make_job: MakeJob, nursery: subprocess.Popen[str]
) -> None:
    method = {"name": "top_k", "density": 0.1}
    exchange = {**CHANGES["strategy.exchange"], "rule": "fedavg", "compression": method}
    job = make_job(WIDE, changes={**CHANGES, "strategy.exchange": exchange})
    found = {}
    for where, at in (("calm", None), ("storm", 14)):
        federation_ = Federation(tmp_path / where, job, nursery, NAMES)
        for who in ("server", *NAMES):
            federation_.start(who, at if who == "north" else None)
        wait_for(lambda each=federation_: each.ended("north"), "the end of north", 60.0)
        if federation_.result("north") is None:
            federation_.start("north")
        found[where] = federation_.finish()["current"]
        events = federation_.events()
        whole = 4 * (12 * 400 + 400 + 400 * 5 + 5)
        assert all(event["bytes"] < 0.25 * whole for event in events if event["event"] == "update")
        home = next((federation_.folder / "north").glob("jobs/*"))
        assert JobState.kept(home).memory.stat().st_size > whole
    assert found["calm"] == found["storm"]


@pytest.mark.parametrize(
    ("exchange", "said"),
    [
        ({"compression": "power_sgd"}, "use `top_k`"),
        ({"compression": {"name": "int8", "warmup": 3}}, "from the first round on"),
        ({"secure": {}, "rule": {"name": "fedavg", "weights": "uniform"}}, "`secure` adds up whole numbers"),
        ({"privacy": "local", "rule": {"name": "fedavg", "weights": "uniform"}}, "mostly noise"),
        ({"rule": "scaffold"}, "control variates"),
        ({"rule": {"name": "fedbuff", "buffer": 2}}, "set `error_feedback = false`"),
        ({"compression": "none", "error_feedback": False}, "there is none"),
    ],
)
def test_what_excludes_it(exchange: dict[str, Any], said: str, make_job: MakeJob) -> None:
    with pytest.raises(JobError, match=said):
        make_job(changes=settings(exchange.pop("compression", "int8"), **exchange))
