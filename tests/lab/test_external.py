"""Machines of a network that join: one loses its power, and another one that waits takes its place."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from cluster.joiners import VERBUND
from conftest import MakeJob, wait_for
from lab import Lab, missing
from processes import MARKED
from verbund.run import Run

pytestmark = pytest.mark.skipif((why := missing()) is not None, reason=why or "")
LOST_AFTER = 3.0


def test_a_machine_without_power(make_job: MakeJob, tmp_path: Path) -> None:
    changes = {
        "cluster.kind": "external",
        "cluster.join_file": "here",
        "cluster.lost_after": LOST_AFTER,
        "cluster.heartbeat": 0.2,
        "cluster.replacements": 3,
        "strategy.mesh": {"data": 2},
        "train.steps": 10**6,
    }
    with Lab(hosts=4) as lab:
        listen = {"cluster.trusted_network": lab.network, "cluster.listen": f"{lab.hosts[0]}:0"}
        (tmp_path / "job.toml").write_text(make_job(MARKED, {**changes, **listen}).toml())

        def computes(host: int) -> list[int]:
            return [pid for pid in lab.pids(host) if (tmp_path / f"pid-{pid}").exists()]

        with (tmp_path / "said").open("w") as said:
            words = [*VERBUND, "train", "job.toml", "--run", "run"]
            command = lab.start(0, words, cwd=tmp_path, stdout=said, stderr=said)
            wait_for((tmp_path / "here").exists, "the address", 60)
            joins = [*VERBUND, "join", "./here", "--secret-file", "here.secret"]
            joiners = [lab.start(host, joins, cwd=tmp_path, stderr=said) for host in (1, 2, 3)]
            wait_for(lambda: sum(bool(computes(host)) for host in (1, 2, 3)) == 2, "two workers", 90)
            (spare,) = [host for host in (1, 2, 3) if not computes(host)]
            victim = next(host for host in (3, 2, 1) if host != spare)
            began = time.time()
            lab.kill(victim)
            wait_for(lambda: computes(spare), "another worker", 60)
            command.send_signal(signal.SIGINT)
            assert command.wait(60) == 130, (tmp_path / "said").read_text()
        for host, joiner in zip((1, 2, 3), joiners, strict=True):
            assert joiner.wait(30) == (-signal.SIGKILL if host == victim else 0)
        assert not [pid for host in range(4) for pid in lab.pids(host)]
    run = Run.open(tmp_path / "run")
    assert run.attempt == 1  # nobody has begun again
    (journal,) = (tmp_path / "run" / "journal").glob("supervisor-*")
    events = [json.loads(line) for line in journal.read_text().splitlines()]
    (loss,) = [event for event in events if "is lost with worker" in str(event)]
    assert f"host {lab.hosts[victim]} is lost with worker" in str(loss)
    assert "another process takes its place" in (tmp_path / "said").read_text()
    assert loss["wall"] - began < LOST_AFTER + 5.0
