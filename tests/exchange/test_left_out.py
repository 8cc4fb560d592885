"""Islands that train alone go on without one that is lost or late, and take it in again: what they come to is compared
with a plain loop over torch modules in float64 in which the same islands take part from exchange to exchange."""

from __future__ import annotations

import copy
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from conftest import Command, MakeJob
from processes import write_job
from trained import parameters
from verbund.checkpoint import folder
from verbund.checkpoint.read import Checkpoint
from verbund.data.order import Order
from verbund.observe.journal import read
from verbund.run import Run
from verbund.stage import launch

# Once in a run, one worker strikes itself where the test wants it; the others are slow until it, or the process that
# takes its place, takes part again.
STRUCK = """
import os, signal, subprocess, time
from pathlib import Path
from torch import nn
from torch.nn.functional import cross_entropy
from verbund.exchange.fragment import Fragment

HERE = Path(__file__).parent
WHERE, SIGNAL, AT, BACK = {where!r}, {signal!r}, {at}, {back}
count = passes = 0

def strike():
    global count, passes
    count += 1
    if count != AT:
        return
    try:
        (HERE / "striking").mkdir()
    except FileExistsError:
        return
    (HERE / "there").write_text(str(len(list(HERE.glob("trains-*")))))
    (HERE / "there").rename(HERE / "struck")
    if BACK:
        subprocess.Popen(["sh", "-c", f"sleep {{BACK}}; kill -CONT {{os.getpid()}}"])
    os.kill(os.getpid(), getattr(signal, SIGNAL))
    passes = -1  # in the step after the one that it was stopped in it may not take part yet

def alone():
    struck = HERE / "struck"
    return struck.exists() and len(list(HERE.glob("trains-*"))) <= int(struck.read_text())

receive = Fragment.receive

def received(self):
    if WHERE == "exchange":
        strike()
    receive(self)

Fragment.receive = received

def model():
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 5))

def loss(output, targets):
    global passes
    if output.requires_grad:
        passes += 1
        if passes == 1:
            (HERE / f"trains-{{os.getpid()}}-{{count}}").touch()
        time.sleep(0.1 if alone() else 0.004)
        if WHERE == "steps":
            strike()
    return cross_entropy(output, targets, reduction="none")
"""


def struck(where: str, signal: str = "SIGKILL", at: int = 10, back: float = 0.0) -> str:
    return STRUCK.format(where=where, signal=signal, at=at, back=back)


CHANGES: dict[str, Any] = {
    "cluster.replacements": 5,
    "cluster.threads": 1,
    "train.objective": None,
    "train.global_batch": 36,
    "train.optimizer.lr": 0.01,
    "strategy.islands": 3,
}


def simulated(run: Run, rows: int = 203) -> tuple[dict[str, torch.Tensor], int]:
    """The common weights after the run's steps in float64, where those islands take part that took part in the run; and
    how many samples were lost."""
    job, steps = run.job, run.summary["steps"]
    settings, islands = job.strategy.exchange, job.strategy.islands
    data = np.load(job.path("data.npz"))
    x, y = torch.from_numpy(data["x"]).double(), torch.from_numpy(data["y"])
    torch.manual_seed(job.seed)
    common = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 5)).double()
    models = {i: copy.deepcopy(common) for i in range(islands)}
    inner = {i: torch.optim.AdamW(m.parameters(), lr=job.train.optimizer.lr) for i, m in models.items()}
    momentum = settings.outer_momentum if settings.name == "diloco" else 0.0
    rate = settings.outer_lr if settings.name == "diloco" else 1.0
    outer = torch.optim.SGD(common.parameters(), lr=rate, momentum=momentum, nesterov=momentum > 0)
    order = Order(rows, job.train.global_batch, job.seed)
    events = run.summary["membership"]["islands"]
    members, lost = list(range(islands)), 0
    seen = dict.fromkeys(members, 0)
    for step in range(1, steps + 1):
        ids, size = order.positions(step - 1), order.size(step - 1)
        for place, island in enumerate(members):
            mine = ids[size * place // len(members) : size * (place + 1) // len(members)]
            inner[island].zero_grad()
            nn.functional.cross_entropy(models[island](x[mine]), y[mine]).backward()
            inner[island].step()
            seen[island] += len(mine)
        now = [event for event in events if event["step"] == step]
        gone = [event for event in now if event["out"] and not event["samples_lost"]]  # with nothing left to send
        for event in (event for event in now if event not in gone):
            for island in event["out"]:
                members.remove(island)
                lost += seen.pop(island)
            giver = min(members)
            for island in event["back"]:
                models[island] = copy.deepcopy(common)
                inner[island] = torch.optim.AdamW(models[island].parameters(), lr=job.train.optimizer.lr)
                inner[island].load_state_dict(copy.deepcopy(inner[giver].state_dict()))
                members, seen[island] = sorted([*members, island]), 0
        if step % settings.steps_between and step < steps:
            continue
        for name, parameter in common.named_parameters():
            base = parameter.detach()
            own = [seen[i] * (base - models[i].get_parameter(name).detach()) for i in members]
            parameter.grad = torch.stack(own).sum(0) / sum(seen.values())
        outer.step()
        for island in members:
            models[island].load_state_dict(common.state_dict())
        members = [island for island in members if not any(island in event["out"] for event in gone)]
        seen = dict.fromkeys(members, 0)
    return {name: p.detach() for name, p in common.named_parameters()}, lost


def check(run: Run) -> list[dict[str, Any]]:
    """Compares a run with its simulation; who went and came."""
    expected, lost = simulated(run)
    for name, value in parameters(run).items():
        torch.testing.assert_close(
            value.double(), expected[name], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert run.summary["samples_lost"] == lost
    assert run.summary["status"] == "done"
    assert run.summary["generations"] == 1
    found: list[dict[str, Any]] = run.summary["membership"]["islands"]
    return found


def longest_pause(run: Run) -> float:
    """Seconds from a step's end until islands went on."""
    events = [event for journal in read(run.path / "journal") for event in journal.events]
    return max(float(event["seconds"]) for event in events if event["name"] == "regrouped")


@pytest.mark.parametrize(
    ("where", "at", "exchange"),
    [
        ("steps", 11, {"name": "local_sgd", "every": 5}),
        ("exchange", 5, {"name": "diloco", "every": 5}),  # each is received, and then applied
    ],
)
def test_killed(where: str, at: int, exchange: dict[str, Any], run_job: Callable[..., Run]) -> None:
    changes = CHANGES | {"strategy.exchange": exchange, "train.steps": 60}
    run = run_job(struck(where, at=at), changes)
    out, *later = check(run)
    assert len(out["out"]) == 1
    assert out["step"] == 15
    back = [island for event in (out, *later) for island in event["back"]]
    assert back == out["out"], "another process has taken its place"
    assert longest_pause(run) < 1.0, "for one that has ended nobody waits"
    undisturbed = run_job(struck("nowhere"), changes)
    assert run.summary["loss"]["last"] == pytest.approx(undisturbed.summary["loss"]["last"], rel=0.15)
    assert "lost with islands" in "".join(run.headline())


def test_late(run_job: Callable[..., Run]) -> None:
    """It is stopped for longer than the grace, goes on, and takes part again: the same process."""
    exchange = {"name": "diloco", "every": 5, "grace": 0.6}
    changes = CHANGES | {"strategy.exchange": exchange, "train.steps": 120}
    run = run_job(struck("steps", "SIGSTOP", at=12, back=1.4), changes)
    out, *later = check(run)
    assert [event["back"] for event in later] == [out["out"]]
    assert out["step"] == 15
    assert out["samples_lost"] > 0
    assert run.summary["membership"]["replacements"] == []
    assert 0.5 < longest_pause(run) < 1.6, "grace and a second"
    assert any("did not come within" in note for note in run.summary["notes"])
    assert "went on without island" in (run.path / "report.html").read_text()


def test_stopped_in_the_middle_of_an_exchange(run_job: Callable[..., Run]) -> None:
    """The others cannot tell who keeps them waiting; the kernel can."""
    exchange = {"name": "local_sgd", "every": 5, "grace": 0.5}
    changes = CHANGES | {"strategy.exchange": exchange, "train.steps": 60, "strategy.islands": 2}
    run = run_job(struck("exchange", "SIGSTOP", at=2, back=1.2), changes)
    (out, *_) = check(run)
    assert len(out["out"]) == 1
    assert longest_pause(run) < 1.5


@pytest.mark.parametrize(
    ("more", "mesh"),
    [
        ({"fragments": 2, "delay": 2}, {}),
        ({"compression": {"name": "int8", "warmup": 0}}, {"data": 2}),
        ({"compression": {"name": "power_sgd", "rank": 2, "warmup": 0}, "delay": 3}, {}),
    ],
    ids=["streaming", "int8-mesh", "power_sgd-delay"],
)
def test_with_what_is_under_way(more: dict[str, Any], mesh: dict[str, int], run_job: Callable[..., Run]) -> None:
    """Fragments, delay, compression, and islands of several workers: nothing is applied by some alone."""
    exchange = {"name": "diloco", "every": 6, **more}
    changes = CHANGES | {
        "strategy.exchange": exchange,
        "strategy.mesh": mesh,
        "strategy.islands": 2,
        "train.steps": 90,
        "validate.every": 20,
        "checkpoint.every": 25,
        "data.validation_fraction": 0.2,
    }
    run = run_job(struck("exchange", at=4), changes)
    summary = run.summary
    assert (summary["status"], summary["steps"], summary["generations"]) == ("done", 90, 1)
    events = summary["membership"]["islands"]
    assert sum(len(event["out"]) for event in events) == 1
    assert sum(len(event["back"]) for event in events) == 1
    assert [step for step, _ in summary["metrics"]["loss"]["curve"]] == [20, 40, 60, 80, 90]
    undisturbed = run_job(struck("nowhere"), changes)
    last, other = (r.summary["metrics"]["loss"]["last"] for r in (run, undisturbed))
    assert last == pytest.approx(other, rel=0.1)
    assert launch.validate(run.path)["metrics"]["loss"] == last, "what is saved is what was judged"


def test_resumed_from_fewer(run_job: Callable[..., Run]) -> None:
    """A checkpoint of two of three islands, none of which replaces the third: a run of three goes on from it."""
    exchange = {"name": "diloco", "every": 5, "grace": 0.3}
    changes = CHANGES | {"strategy.exchange": exchange, "train.steps": 24, "cluster.heartbeat": 60.0}
    run = run_job(struck("steps", "SIGSTOP", at=8), changes | {"checkpoint.every": 12, "checkpoint.keep": 9})
    assert check(run)[0]["step"] == 10
    with Checkpoint.open(folder(run.checkpoints, 12)) as checkpoint:
        assert checkpoint.state["exchange"]["islands"] == 2
        assert checkpoint.state["samples_lost"] == run.summary["samples_lost"] > 0
    cut = run.path.with_name("cut")
    shutil.copytree(run.path, cut)
    shutil.rmtree(folder(cut / "checkpoints", 24))
    again = launch.resume(cut)
    assert again.summary["steps"] == 24
    assert again.summary["samples_lost"] == run.summary["samples_lost"]
    assert any("There were 2 islands" in note for note in again.summary["notes"])


def test_asked_to_end(run_job: Callable[..., Run]) -> None:
    """SIGTERM to a worker: its island goes after the next exchange, and nothing is lost with it."""
    exchange = {"name": "diloco", "every": 5}
    changes = CHANGES | {"strategy.exchange": exchange, "train.steps": 40}
    run = run_job(struck("steps", "SIGTERM", at=8), changes)
    events = check(run)
    (out,) = [island for event in events for island in event["out"]]
    assert [island for event in events for island in event["back"]] == [out]
    assert run.summary["samples_lost"] == 0
    assert "was asked to end" in run.summary["membership"]["replacements"][0]["why"]


def test_too_few_wait_for_another(run_job: Callable[..., Run]) -> None:
    """With a quorum of all the others wait, and exchange with the process that has taken the place."""
    exchange = {"name": "local_sgd", "every": 5, "quorum": 2}
    changes = CHANGES | {"strategy.exchange": exchange, "strategy.islands": 2, "train.steps": 30}
    run = run_job(struck("steps", at=8), changes)
    (event,) = check(run)
    assert event["out"] == event["back"]
    assert event["step"] == 10


def test_refusals(make_job: MakeJob, tmp_path: Path, command: Command) -> None:
    begun = time.monotonic()
    for changes, words in (
        ({"exchange": {"name": "local_sgd", "quorum": 3}}, "a `quorum` of 3 needs more than 2 islands"),
        ({"exchange": {"name": "all_reduce", "grace": 3.0}}, "`grace` is for the exchanges local_sgd and diloco"),
        ({"exchange": {"name": "local_sgd", "quorum": 0}}, "strategy.exchange.quorum"),
        ({"exchange": {"name": "local_sgd", "grace": 1.0}}, "no lost worker is replaced"),
    ):
        write_job(make_job, tmp_path, {"strategy.islands": 2, "train.steps": 1})
        more = [f"--set=strategy.exchange.{key}={value}" for key, value in changes["exchange"].items()]
        told = command("train", "job.toml", *more)
        assert told.status == 2
        assert words in told.err
    assert time.monotonic() - begun < 20
