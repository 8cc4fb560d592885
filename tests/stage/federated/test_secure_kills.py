"""Secure rounds in which server or client is killed at any operation that others see."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from conftest import MakeJob
from storm import Federation
from verbund.job import Job

NAMES = ("north", "south", "village")
ROUNDS = 2
EXCHANGE: dict[str, Any] = {
    "name": "federated",
    "clients": len(NAMES),
    "rule": {"name": "fedavg", "weights": "uniform"},
    "round": {"quorum": 1.0, "lost_after": 30.0, "gather": 30.0, "deadline": 30.0, "attempts": 50},
}
SECURE = {"bits": 20, "threshold": 1.0, "colluding": 0.0}


def job_of(make_job: MakeJob, **exchange: Any) -> Job:
    changes = {
        "train.steps": ROUNDS,
        "train.global_batch": 16,
        "train.optimizer": {"name": "sgd", "lr": 0.1},
        "data.validation_fraction": 0.2,
        "strategy.exchange": {**EXCHANGE, **exchange},
    }
    return make_job(changes=changes)


def calm(folder: Path, job: Job, forking: subprocess.Popen[str]) -> tuple[Federation, str]:
    """An undisturbed run, and the version that it comes to."""
    federation = Federation(folder, job, forking, NAMES)
    for who in ("server", *NAMES):
        federation.start(who)
    found = federation.finish()
    assert found["phase"] == "done"
    return federation, found["current"]


def model(federation: Federation, current: str) -> dict[str, Any]:
    return load_file(federation.folder / "run" / "federated" / "versions" / current)


def test_the_server_is_killed_at_any_operation(
    tmp_path: Path, make_job: MakeJob, nursery: subprocess.Popen[str]
) -> None:
    """Undisturbed, the model is that of rounds without masks within what they round; killed, it is the same bit for
    bit, and no exchange begins anew."""
    plain, first = calm(tmp_path / "plain", job_of(make_job), nursery)
    job = job_of(make_job, secure=SECURE)
    secure, expected = calm(tmp_path / "calm", job, nursery)
    wanted = model(plain, first)
    for name, values in model(secure, expected).items():
        assert float((values - wanted[name]).abs().max()) <= ROUNDS * 4.0 / (2**19 - 1), name
    source = random.Random(3)
    storm = Federation(tmp_path / "storm", job, nursery, NAMES)
    for who in NAMES:
        storm.start(who)
    assert storm.strike("server", source, 8, 50, most=80) > 5
    assert storm.finish()["current"] == expected
    lines = storm.events()
    counts = {kind: sum(line["event"] == kind for line in lines) for kind in ("invited", "answered", "summed")}
    assert counts == {"invited": ROUNDS, "answered": 5 * len(NAMES) * ROUNDS, "summed": ROUNDS}


def test_a_client_is_killed_at_any_operation(tmp_path: Path, make_job: MakeJob, nursery: subprocess.Popen[str]) -> None:
    """It drops out of the exchanges that are under way. Where all are needed these begin anew, and each round that is
    counted has the whole cohort; one whose shares were being revealed is left out, by all."""
    job = job_of(make_job, secure=SECURE)
    source = random.Random(4)
    storm = Federation(tmp_path / "storm", job, nursery, NAMES)
    for who in ("server", *NAMES[1:]):
        storm.start(who)
    storm.strike(NAMES[0], source, 4, 40, most=80, harmed=12)
    assert storm.finish()["phase"] == "done"
    lines = storm.events()
    summed = [line for line in lines if line["event"] == "summed"]
    assert all(line["clients"] == list(NAMES) for line in summed)
    skipped = [line for line in lines if line["event"] == "skipped"]
    assert len(summed) + len(skipped) == ROUNDS
    invited = [line["number"] for line in lines if line["event"] == "invited"]
    assert invited == list(range(1, len(invited) + 1))
    keys = [(line["client"], line["number"], line["step"]) for line in lines if line["event"] == "answered"]
    assert len(set(keys)) == len(keys), "nothing is answered twice"
