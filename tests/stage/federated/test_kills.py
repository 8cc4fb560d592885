"""Server and clients are killed at any operation that others see; the model is that of an undisturbed run."""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import MakeJob, wait_for
from processes import alive
from verbund.checkpoint import newest_valid
from verbund.comm.wire import Identity
from verbund.data.prepare import prepare
from verbund.exchange.federated.audit import heads_told, verify
from verbund.exchange.federated.enrolment import Enrolment
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


class Federation:
    """A server and its clients, each in a process that can be started again."""

    def __init__(self, folder: Path, job: Job, nursery: subprocess.Popen[str]) -> None:
        self.folder, self.job, self._nursery = folder, job, nursery
        folder.mkdir()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"tcp:127.0.0.1:{free.getsockname()[1]}"
        self.enrolment = Enrolment(folder / "federation")
        self.prepared = prepare(job.data, folder=Path(job.folder)).train
        self.identities = {}
        for name in NAMES:
            identity = Identity.kept(folder / name / "identity.pem")
            self.enrolment.enrol(name, self.enrolment.invite(name, {}, 60.0).secret, identity.certificate)
            self.identities[name] = identity
        self.pids: dict[str, int] = {}
        self.policies: dict[str, dict[str, Any]] = {}
        """Of clients that permit more than any task."""

    def start(self, who: str, at: int | None = None, before: bool = False) -> None:
        common = {"address": self.address, "result": str(self.folder / f"{who}.json"), "at": at, "before": before}
        if who == "server":
            more: dict[str, Any] = {
                "role": "server",
                "job": self.job.resolved(),
                "folder": self.job.folder,
                "run": str(self.folder / "run"),
                "federation": str(self.enrolment.folder),
            }
        else:
            more = {
                "role": "client",
                "name": who,
                "home": str(self.folder / who),
                "identity": str(self.identities[who].path),
                "fingerprint": self.enrolment.identity.fingerprint,
                "prepared": self.prepared,
                "data": self.job.data.train,
                "policy": self.policies.get(who, {"tasks": ["*"]}),
            }
        assert self._nursery.stdin
        assert self._nursery.stdout
        self._nursery.stdin.write(json.dumps({**common, **more}) + "\n")
        self._nursery.stdin.flush()
        self.pids[who] = int(self._nursery.stdout.readline())

    def result(self, who: str) -> dict[str, Any] | None:
        path = self.folder / f"{who}.json"
        return json.loads(path.read_text() or "null") if path.exists() else None

    def ended(self, who: str) -> bool:
        return self.result(who) is not None or not alive(self.pids[who])

    def finish(self) -> dict[str, Any]:
        """Waits for all to end; the server's result."""
        for who in ("server", *NAMES):
            wait_for(lambda who=who: self.ended(who), f"the end of {who}", 60.0)
            assert self.result(who) is not None, f"{who} ended without a result"
        found = self.result("server")
        assert found is not None
        return found

    def check(self) -> None:
        """Nothing lost, nothing doubled, and the log is what clients were told."""
        log = self.folder / "run" / "federated" / "audit.jsonl"
        for name in NAMES:
            assert self.result(name)["counted"] == ROUNDS  # type: ignore[index]
            verify(log, heads_told(self.folder / name / "audit.jsonl", verify(log).log))
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        for event, many in {
            "begun": 1,
            "update": ROUNDS * 2,
            "closed": ROUNDS,
            "stepped": ROUNDS,
            "evaluated": 1,
        }.items():
            assert sum(line["event"] == event for line in lines) == many, event
        newest_valid(self.folder / "run" / "checkpoints")


@pytest.fixture(scope="module")
def nursery() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(Path(__file__).with_name("nursery.py"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.terminate()


@pytest.fixture
def undisturbed(tmp_path: Path, make_job: MakeJob, nursery: subprocess.Popen[str]) -> tuple[Job, str]:
    job = make_job(changes=CHANGES)
    calm = Federation(tmp_path / "calm", job, nursery)
    for who in ("server", *NAMES):
        calm.start(who)
    found = calm.finish()
    calm.check()
    assert found["phase"] == "done"
    return job, found["current"]


@pytest.mark.parametrize("victim", ["server", "north"])
def test_killed_at_any_operation(
    victim: str, tmp_path: Path, undisturbed: tuple[Job, str], nursery: subprocess.Popen[str]
) -> None:
    job, expected = undisturbed
    source = random.Random(victim)
    storm = Federation(tmp_path / "storm", job, nursery)
    for who in ("server", *NAMES):
        if who != victim:
            storm.start(who)
    lives = 0
    while storm.result(victim) is None:
        lives += 1
        assert lives < 60, "it does not get on"
        storm.start(victim, source.randint(3, 24), source.random() < 0.5)
        wait_for(lambda: storm.ended(victim), f"the end of {victim}", 60.0)
    assert lives > 5
    assert storm.finish()["current"] == expected
    storm.check()


def test_all_are_killed_in_turn(tmp_path: Path, undisturbed: tuple[Job, str], nursery: subprocess.Popen[str]) -> None:
    job, expected = undisturbed
    source = random.Random(5)
    storm = Federation(tmp_path / "storm", job, nursery)
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
    storm.check()
    assert Home(tmp_path / "storm" / "north").pinned() is None  # this test gave the fingerprint itself
