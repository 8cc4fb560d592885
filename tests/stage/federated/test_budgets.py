"""A server with a privacy budget: it ends when that is spent, and a kill neither forgets nor doubles what was."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from conftest import MakeJob, wait_for
from stage.federated.test_kills import CHANGES, NAMES
from storm import Federation
from verbund.errors import InputError
from verbund.exchange.federated.policy import Policy
from verbund.exchange.federated.privacy import Accountant, Event
from verbund.stage.federated.offer import Offer


def changes(**privacy: Any) -> dict[str, Any]:
    exchange = {
        **CHANGES["strategy.exchange"],
        "rule": {"name": "fedavg", "weights": "uniform"},
        "privacy": {"kind": "central", "noise": 2.0, **privacy},
    }
    return {**CHANGES, "train.steps": 5, "strategy.exchange": exchange}


def test_a_budget_survives_kills_and_ends_the_rounds(
    tmp_path: Path, make_job: MakeJob, nursery: subprocess.Popen[str]
) -> None:
    accountant = Accountant(1e-5)
    accountant.spend(Event(noise=2.0), 2)
    exact = accountant.spent()
    storm = Federation(tmp_path / "storm", make_job(changes=changes(budget=exact.epsilon + 1e-6)), nursery, NAMES)
    for name in NAMES:
        storm.start(name)
    for at in (14, 20):  # of its operations
        storm.start("server", at)
        wait_for(lambda: storm.ended("server"), "the end of the server", 60.0)
        assert storm.result("server") is None, "it was killed"
    storm.start("server")
    assert storm.finish()["phase"] == "done"
    log = storm.folder / "run" / "federated" / "audit.jsonl"
    events = [json.loads(line) for line in log.read_text().splitlines()]
    stepped = [event for event in events if event["event"] == "stepped"]
    assert [event["privacy"]["spent"]["releases"] for event in stepped] == [1, 2]
    assert stepped[-1]["privacy"]["spent"]["epsilon"] == exact.epsilon
    assert [event["why"] for event in events if event["event"] == "ended"] == ["budget"]


def test_local_noise_is_added_by_clients_who_keep_account(
    tmp_path: Path, make_job: MakeJob, nursery: subprocess.Popen[str]
) -> None:
    """The server gets updates with noise and no losses; each client knows what it has spent, and so does the server."""
    accountant = Accountant(1e-5)
    accountant.spend(Event(noise=10.0), 2)
    exact = accountant.spent()
    noise = {"kind": "local", "noise": 20.0, "clip": 0.05, "budget": exact.epsilon + 1e-6}
    federation = Federation(tmp_path / "local", make_job(changes=changes(**noise)), nursery, NAMES)
    for who in ("server", *NAMES):
        federation.start(who)
    assert federation.finish()["phase"] == "done"
    log = federation.folder / "run" / "federated" / "audit.jsonl"
    events = [json.loads(line) for line in log.read_text().splitlines()]
    updates = [event for event in events if event["event"] == "update"]
    assert len(updates) == 4
    assert not any(event["sums"] or "state" in event for event in updates), "nothing without noise has left a client"
    norms = [event["norm"]["mean"] for event in events if event["event"] == "stepped"]
    values = 12 * 16 + 16 + 16 * 5 + 5
    assert norms == pytest.approx([20.0 * 0.05 * values**0.5] * 2, rel=0.15)
    assert [event["why"] for event in events if event["event"] == "ended"] == ["budget"]
    for name in NAMES:
        notes = [json.loads(line) for line in (federation.folder / name / "audit.jsonl").read_text().splitlines()]
        spent = [note["epsilon"] for note in notes if note["event"] == "round"]
        assert spent[-1] == exact.epsilon
        assert spent[0] < spent[1]


def test_clients_are_told_the_budget_and_may_refuse_it(make_job: MakeJob) -> None:
    def problems(policy: Policy, **privacy: Any) -> str:
        job = make_job(changes=changes(**privacy))
        return " ".join(str(problem) for problem in policy.job_problems(Offer.of(job).facts(job, None)))

    policy = Policy(tasks=["*"], epsilon=3.0)
    assert not problems(policy, budget=3.0)
    assert "budget is ε 4" in problems(policy, budget=4.0)
    assert "no differential privacy with a budget" in problems(policy)
    assert "δ 0.01" in problems(policy, budget=3.0, delta=0.01)


def test_what_real_clients_do_not_do_is_refused(make_job: MakeJob) -> None:
    """No server knows which of them are there, of whom each would have to be drawn by itself."""
    job = make_job(changes=changes(sampling="poisson"))
    with pytest.raises(InputError, match="not available with real clients") as caught:
        Offer.of(job)
    assert str(caught.value).startswith("job, strategy.exchange.privacy.sampling:")
