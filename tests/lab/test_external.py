"""Machines of a network that join: one loses its power, and another one that waits takes its place."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from cluster.joiners import VERBUND
from conftest import MakeJob, losses, wait_for
from lab import Lab, missing
from processes import MARKED, gone
from verbund.run import Run
from verbund.stage import launch

pytestmark = pytest.mark.skipif((why := missing()) is not None, reason=why or "")
LOST_AFTER = 3.0


@pytest.mark.parametrize(("machines", "losses_", "come_back"), [(5, 2, False), (3, 1, True)])
def test_machines_are_gone(
    machines: int, losses_: int, come_back: bool, make_job: MakeJob, tmp_path: Path, shared_cluster: object
) -> None:
    """Two at once that have no power, of which the news comes while those that are left meet anew; and one behind a
    link that is cut, and whole again when another one has its place: it finds that it is not needed."""
    changes = {
        "cluster.kind": "external",
        "cluster.join_file": "here",
        "cluster.lost_after": LOST_AFTER,
        "cluster.heartbeat": 0.2,
        "cluster.orphan_grace": 1.0,
        "cluster.replacements": 3,
        "strategy.mesh": {"data": machines - losses_},
        "train.steps": 10**6,
    }
    numbers = range(1, machines + 1)
    with Lab(hosts=machines + 1) as lab:
        listen = {"cluster.trusted_network": lab.network, "cluster.listen": f"{lab.hosts[0]}:0"}
        (tmp_path / "job.toml").write_text(make_job(MARKED, {**changes, **listen}).toml())

        def computing() -> list[int]:
            return [host for host in numbers if any((tmp_path / f"pid-{pid}").exists() for pid in lab.pids(host))]

        with (tmp_path / "said").open("w") as said:
            words = [*VERBUND, "train", "job.toml", "--run", "run"]
            command = lab.start(0, words, cwd=tmp_path, stdout=said, stderr=said)
            wait_for((tmp_path / "here").exists, "the address", 60)
            joins = [*VERBUND, "join", "./here", "--secret-file", "here.secret"]
            joiners = {host: lab.start(host, joins, cwd=tmp_path, stderr=said) for host in numbers}
            wait_for(lambda: len(computing()) == machines - losses_, "the workers", 90)
            spares = [host for host in numbers if host not in computing()]
            victims = [host for host in reversed(numbers) if host not in spares][:losses_]
            began = time.time()
            former = [pid for victim in victims for pid in lab.pids(victim)]
            for victim in victims:
                if come_back:
                    lab.cut(victim)
                else:
                    lab.kill(victim)
            wait_for(lambda: set(spares) <= set(computing()), "other workers", 60)
            if come_back:
                lab.restore(victims[0])
                assert gone(former, 20)
            command.send_signal(signal.SIGINT)
            assert command.wait(60) == 130, (tmp_path / "said").read_text()
        for host, joiner in joiners.items():
            assert joiner.wait(30) == ((3 if come_back else -signal.SIGKILL) if host in victims else 0)
        assert not [pid for host in range(machines + 1) for pid in lab.pids(host)]
    run = Run.open(tmp_path / "run")
    assert run.attempt == 1  # nobody has begun again
    (journal,) = (tmp_path / "run" / "journal").glob("supervisor-*")
    events = [json.loads(line) for line in journal.read_text().splitlines()]
    losses_told = [event for event in events if "is lost with worker" in str(event)]
    assert len(losses_told) == losses_
    for victim in victims:
        assert f"host {lab.hosts[victim]} is lost with worker" in str(losses_told)
    assert "another process takes its place" in (tmp_path / "said").read_text()
    assert losses_told[0]["wall"] - began < LOST_AFTER + 5.0
    found = losses(run)
    assert [step for step, _ in run.summary["loss"]["curve"]] == list(range(run.summary["steps"]))
    alone = launch.train(make_job(MARKED, {"train.steps": len(found)}), tmp_path / "alone")
    assert found == pytest.approx(losses(alone), rel=1e-5)
