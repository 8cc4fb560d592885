"""Server and clients are killed at any operation that others see; the model is that of an undisturbed run."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest

from conftest import MakeJob, wait_for
from processes import alive
from storm import Federation
from verbund.checkpoint import newest_valid
from verbund.job import Job
from verbund.stage.federated.home import Home

NAMES = ("north", "south")
ROUNDS = 3
CHANGES = {
    "train.steps": ROUNDS,
    "train.global_batch": 16,
    "train.optimizer": {"name": "sgd", "lr": 0.1},
    "data.validation_fraction": 0.2,
    "strategy.exchange": {
        "name": "federated",
        "clients": len(NAMES),
        "rule": "scaffold",
        "round": {"quorum": 1.0, "lost_after": 30.0, "gather": 30.0, "deadline": 30.0},
    },
}


def check(federation: Federation) -> None:
    """Nothing lost, nothing doubled."""
    lines = federation.events()
    for name in NAMES:
        assert federation.result(name)["counted"] == ROUNDS  # type: ignore[index]
    for event, many in {
        "begun": 1,
        "update": ROUNDS * 2,
        "closed": ROUNDS,
        "stepped": ROUNDS,
        "evaluated": 1,
    }.items():
        assert sum(line["event"] == event for line in lines) == many, event
    newest_valid(federation.folder / "run" / "checkpoints")


@pytest.fixture
def undisturbed(tmp_path: Path, make_job: MakeJob, nursery: subprocess.Popen[str]) -> tuple[Job, str]:
    job = make_job(changes=CHANGES)
    calm = Federation(tmp_path / "calm", job, nursery, NAMES)
    for who in ("server", *NAMES):
        calm.start(who)
    found = calm.finish()
    check(calm)
    assert found["phase"] == "done"
    return job, found["current"]


@pytest.mark.parametrize("victim", ["server", "north"])
def test_killed_at_any_operation(
    victim: str, tmp_path: Path, undisturbed: tuple[Job, str], nursery: subprocess.Popen[str]
) -> None:
    job, expected = undisturbed
    source = random.Random(victim)
    storm = Federation(tmp_path / "storm", job, nursery, NAMES)
    for who in ("server", *NAMES):
        if who != victim:
            storm.start(who)
    assert storm.strike(victim, source, 3, 24, most=60) > 5
    assert storm.finish()["current"] == expected
    check(storm)


def test_all_are_killed_in_turn(tmp_path: Path, undisturbed: tuple[Job, str], nursery: subprocess.Popen[str]) -> None:
    job, expected = undisturbed
    source = random.Random(5)
    storm = Federation(tmp_path / "storm", job, nursery, NAMES)
    everybody = ("server", *NAMES)
    deaths = 0

    def stir() -> bool:
        nonlocal deaths
        for who in everybody:
            if storm.result(who) is None and (who not in storm.pids or not alive(storm.pids[who])):
                deaths += who in storm.pids
                at = source.randint(6, 25) if deaths < 20 else None
                storm.start(who, at, source.random() < 0.5)
        return all(storm.result(who) is not None for who in everybody)

    wait_for(stir, "the end of all", 90.0)
    assert deaths > 4
    assert storm.finish()["current"] == expected
    check(storm)
    assert Home(tmp_path / "storm" / "north").pinned() is None  # this test gave the fingerprint itself
