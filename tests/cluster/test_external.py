"""Machines that are started from outside: they join, are lost and replaced, or are refused."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.joiners import EXTERNAL, ended, join, train, write
from conftest import Command, MakeJob, losses, wait_for
from processes import MARKED, children, gone, pids
from verbund.cluster.external import ExternalCluster
from verbund.cluster.host import versions
from verbund.cluster.invitation import PORT, address_of
from verbund.cluster.joining import Place
from verbund.comm.rendezvous import dial
from verbund.comm.wire import Connection, Secret, WireError
from verbund.errors import ClusterLost, Interrupted, JobError
from verbund.interrupts import Interrupts
from verbund.job import Job
from verbund.run import Run
from verbund.stage import restarts

TORCHRUN = {"MASTER_ADDR": "n0", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "1", "RANK": "9", "GROUP_RANK": "1"}
PLACES = [
    ({}, Place(None, None, 0, 1)),
    ({**TORCHRUN, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}, Place(f"n0:{PORT}", 1, 1, 8)),
    ({"MASTER_ADDR": "n0", "MASTER_PORT": "4000", "RANK": "3"}, Place("n0:4000", 3, 0, 1)),
    ({"SLURM_LAUNCH_NODE_IPADDR": "10.0.0.7", "SLURM_NODEID": "2"}, Place(f"10.0.0.7:{PORT}", 2, 0, 1)),
    ({"SLURM_PROCID": "5", "SLURM_NODEID": "2", "SLURM_LOCALID": "1", "SLURM_NTASKS_PER_NODE": "2"}, (None, 2, 1, 2)),
    ({"JOB_COMPLETION_INDEX": "3", "VERBUND_JOIN": "job-0.job:29170"}, Place("job-0.job:29170", 3, 0, 1)),
]


@pytest.mark.parametrize(("environment", "place"), PLACES)
def test_what_starts_it_says_its_place(environment: dict[str, str], place: Place | tuple[None, int, int, int]) -> None:
    assert Place.of(environment) == (place if isinstance(place, Place) else Place(*place))


def test_addresses() -> None:
    assert address_of("node1:4") == ("node1", 4)
    assert address_of("node1") == ("node1", PORT)
    assert address_of("[fd00::1]:4") == ("fd00::1", 4)
    assert address_of("fd00::1") == ("fd00::1", PORT)
    for text in ("", ":", "a:b", "a:70000"):
        with pytest.raises(ValueError, match="no address such as"):
            address_of(text)


def test_same_numbers_and_nothing_is_left(run_job: Callable[..., Run], make_job: MakeJob, tmp_path: Path) -> None:
    alone = run_job()
    write(tmp_path, make_job, {"strategy.mesh": {"data": 3}, "cluster.nodes": 2})
    command = train(tmp_path, "--json")
    joiners = [join(tmp_path, "--slots", "2", JOB_COMPLETION_INDEX=index) for index in "10"]
    out, errors = command.communicate(timeout=60)
    assert command.returncode == 0, errors
    for joiner in joiners:
        assert "joined: this machine" in ended(joiner, 0)
    assert json.loads(out)["world"] == 3
    run = Run.open(tmp_path / "run")
    assert losses(run) == pytest.approx(losses(alone), rel=1e-5)
    assert run.job.cluster.hosts == []  # a resumed run asks anew who is there
    assert not (tmp_path / "here").exists()


ISLANDS: dict[str, Any] = {"strategy.islands": 2, "strategy.exchange": {"name": "local_sgd", "every": 2}}


@pytest.mark.parametrize(
    ("strategy", "at_once"),
    [
        ({"strategy.mesh": {"data": 2}}, True),
        (ISLANDS, True),
        ({**ISLANDS, "train.randomness": "worker"}, False),
    ],
)
def test_a_lost_host_is_replaced_by_one_that_waits(
    strategy: dict[str, Any], at_once: bool, make_job: MakeJob, tmp_path: Path
) -> None:
    """At once where workers may come and go; else from the newest checkpoint."""
    changes = {"train.steps": 10**6, "checkpoint.every": 3, "cluster.heartbeat": 0.2, "cluster.replacements": 3}
    changes |= strategy
    write(tmp_path, make_job, changes, MARKED)
    command = train(tmp_path)
    first, second, spare = [join(tmp_path) for _ in range(3)]
    before = pids(tmp_path, 2, 40)
    wait_for(lambda: any((tmp_path / "run" / "checkpoints").glob("step-*")), "a checkpoint")
    victim = next(joiner for joiner in (first, second, spare) if _workers(joiner, before))
    everything = [pid for warm in children(victim.pid) for pid in [warm, *children(warm)]]
    victim.kill()
    assert gone(everything, 10)
    new = 1 if at_once else 2
    wait_for(lambda: len([pid for pid in pids(tmp_path, 1, 60) if pid not in before]) >= new, "other workers", 60)
    command.send_signal(signal.SIGINT)
    errors = ended(command, 130)
    assert "host 127.0.0.1" in errors
    assert "is lost with worker" in errors
    goes_on = "another process takes its place" if at_once else "training goes on from step"
    assert goes_on in errors
    assert (Run.open(tmp_path / "run").attempt == 1) == at_once
    for joiner in (first, second, spare):
        if joiner is not victim:
            ended(joiner, 0)
    victim.communicate(timeout=10)


def _workers(joiner: subprocess.Popen[str], among: list[int]) -> list[int]:
    return [pid for warm in children(joiner.pid) for pid in children(warm) if pid in among]


def test_who_ends_says_why(make_job: MakeJob, tmp_path: Path) -> None:
    """A machine that is told to end, and a command that is killed: each says so, and nothing is left."""
    changes = {"train.steps": 10**6, "cluster.heartbeat": 0.2, "cluster.orphan_grace": 1.0, "cluster.nodes": 2}
    write(tmp_path, make_job, {**changes, "strategy.mesh": {"data": 2}, "cluster.replacements": 1}, MARKED)
    command = train(tmp_path)
    joiners = [join(tmp_path), join(tmp_path)]
    pids(tmp_path, 2, 40)
    joiners[0].terminate()
    ended(joiners[0], 130)
    joiners[0] = join(tmp_path, JOB_COMPLETION_INDEX="0")
    before = pids(tmp_path, 2, 40)
    command.kill()
    _, errors = command.communicate(timeout=10)
    assert "it was told to end (SIGTERM or Ctrl-C): training goes on from the start" in errors
    for joiner in joiners:
        assert "the command is lost" in ended(joiner, 3)
    assert gone(before, 10)


def test_too_few_slots(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job(changes={**EXTERNAL, "strategy.mesh": {"data": 3}, "cluster.join_within": 0.5})
    (tmp_path / "cache").mkdir()
    said: list[str] = []
    cluster = ExternalCluster(job, tmp_path / "cache", [], {}, said.append)
    try:
        joiner = dial(cluster.meeting, "join", -1)
        joiner.send("offer", {"address": "127.0.0.1", "slots": 2, "rank": None, "versions": versions()})
        with pytest.raises(ClusterLost) as caught:
            cluster.settled(job)
    finally:
        closing = threading.Thread(target=cluster.close)
        closing.start()
        asked = [joiner.receive(5).kind for _ in range(2)]
        joiner.close()
        closing.join()
    assert asked == ["asked", "end"]  # a machine that comes early imports what it will need
    assert "only 2 of 3 slots were there after 0.5 s (127.0.0.1 with 2)" in str(caught.value)
    assert f"verbund join {cluster.joins_at} --secret-file FILE" in str(caught.value)
    (invited,) = said
    assert invited.startswith("waiting for 3 slots")
    assert f": verbund join {cluster.joins_at} --secret-file {tmp_path}/cache/join/test-" in invited


def test_interrupted_while_it_waits_for_machines(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job()
    run = Run.create(tmp_path / "run", job)

    class Waiting:
        def settled(self, job: Job) -> Job:
            signal.raise_signal(signal.SIGINT)
            return job

    monkeypatch.setattr(restarts, "attempt", lambda *_: pytest.fail("it went on"))
    nothing: Any = None
    with Interrupts() as interrupts, pytest.raises(Interrupted, match="while it waited for hosts"):
        restarts.persistent(Waiting(), run, job, nothing, nothing, None, True, interrupts)  # type: ignore[arg-type]


def test_who_is_turned_away(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job(changes={**EXTERNAL, "cluster.trusted_network": "127.0.0.1/32", "cluster.join_within": 0.5})
    said: list[str] = []
    (tmp_path / "cache").mkdir()
    cluster = ExternalCluster(job, tmp_path / "cache", [], {}, said.append)
    offer = {"address": "127.0.0.1", "slots": 1, "rank": None, "versions": versions()}
    wrong: list[tuple[dict[str, object], str]] = [
        ({**offer, "versions": {**versions(), "torch": "2.0.0"}}, "has torch 2.0.0 (here "),
        ({**offer, "address": "127.0.0.2"}, "127.0.0.2, which does not lie in `trusted_network` 127.0.0.1/32"),
        ({**offer, "slots": 0}, ""),
        ({"slots": "many"}, ""),
    ]
    try:
        with pytest.raises(WireError, match="secret"):
            dial(replace(cluster.meeting, secret=Secret.create()), "join", -1)
        connections: list[Connection] = []
        for record, _ in wrong:
            connections.append(dial(cluster.meeting, "join", -1))
            connections[-1].send("offer", record)
        stranger = dial(cluster.meeting, "warm", 7)
        with pytest.raises(ClusterLost, match=r"only 0 of 1 slots.*turned away: "):
            cluster.settled(job)
        for (_, message), connection in zip(wrong, connections, strict=True):
            if message:
                answer = connection.receive(5)
                assert answer.kind == "refused"
                assert message in answer.fields["error"]["what"]
            with pytest.raises(WireError):
                connection.receive(5)
        with pytest.raises(WireError):
            stranger.receive(5)
        assert cluster.lost is not None
    finally:
        cluster.close()


def test_arguments_of_who_joins(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Secret.create().write(tmp_path / "secret")
    (tmp_path / "open").write_bytes(bytes(32))
    to, known = "127.0.0.1:1", ["--secret-file", "secret"]
    wrong = [
        ([], 2, "HOST:PORT of the command is missing"),
        ([to], 2, "the secret is missing"),
        ([to, "--secret-file", "open"], 2, "others than this user may read the secret"),
        ([to, *known, "--slots", "0"], 2, "at least 1 worker"),
        ([to, *known, "--address", "here"], 2, "`here` is no address"),
        (["127.0.0.1:b", *known], 2, "`127.0.0.1:b` is no address"),
        ([to, *known, "--within", "0.3"], 3, "no run has started within 0.3 s: nobody listens at"),
    ]
    other = subprocess.Popen(["sleep", "60"])
    for arguments, status, message in wrong:
        ended_ = command("join", *arguments)
        assert (ended_.status, message in ended_.err) == (status, True), ended_.err
    assert other.poll() is None  # what else its process has started is left alone
    other.kill()
    other.wait()
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert "local rank 1: the process of local rank 0 joins" in command("join").out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cluster.listen": "10.0.0.1"}, "`listen` is an address with a port"),
        ({"cluster.listen": "a:99999"}, "`listen` is an address with a port"),
    ],
)
def test_a_job_that_listens_nowhere(changes: dict[str, str], message: str, make_job: MakeJob) -> None:
    with pytest.raises(Exception, match=message):
        make_job(changes={**EXTERNAL, **changes})


def test_several_hosts_without_a_trusted_network(make_job: MakeJob) -> None:
    """What a job of kind `hosts` is told before anything starts is told as soon as machines are there."""
    job = make_job(changes={"cluster.kind": "external", "strategy.mesh": {"data": 2}})
    with pytest.raises(Exception, match="exchange tensors without encryption"):
        Job.build(
            job.resolved(), {"cluster.hosts": ["a", "b"], "cluster.slots": [1, 1]}, source="", folder=Path(job.folder)
        )


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"cluster.kind": "external", "cluster.nodes": 2, "strategy.mesh": {"data": 2}}, True),
        ({"cluster.kind": "ray", "strategy.islands": 2, "strategy.exchange": "all_reduce"}, True),
        ({"cluster.kind": "ray", "strategy.islands": 2, "strategy.exchange": "diloco"}, False),
        ({"cluster.kind": "external", "cluster.nodes": 2, "strategy.islands": 2, "strategy.exchange": "diloco"}, False),
        ({"cluster.kind": "external", "cluster.nodes": 3, "strategy.islands": 2, "strategy.mesh": {"data": 2}}, True),
        ({**EXTERNAL, "cluster.nodes": 2, "strategy.mesh": {"data": 2}}, False),
    ],
)
def test_several_machines_that_are_sure_to_come_need_a_trusted_network(
    changes: dict[str, Any], refused: bool, make_job: MakeJob
) -> None:
    if refused:
        with pytest.raises(JobError, match="exchange tensors without encryption"):
            make_job(changes=changes)
    else:
        make_job(changes=changes)


def test_a_machine_with_too_few_slots_is_turned_away_where_no_network_is_trusted(
    make_job: MakeJob, tmp_path: Path
) -> None:
    """At once, and both sides are told: with one more of its kind the job would be refused."""
    job = make_job(changes={"cluster.kind": "external", "strategy.mesh": {"data": 2}, "cluster.join_within": 30.0})
    (tmp_path / "cache").mkdir()
    said: list[str] = []
    cluster = ExternalCluster(job, tmp_path / "cache", [], {}, said.append)

    def wait() -> None:
        with pytest.raises(Interrupted):
            cluster.settled(job)

    waiting = threading.Thread(target=wait)
    cluster._check = lambda: _raise_if(any("turned away" in text for text in said))  # type: ignore[method-assign]
    waiting.start()
    try:
        joiner = dial(cluster.meeting, "join", -1)
        joiner.send("offer", {"address": "127.0.0.1", "slots": 1, "rank": None, "versions": versions()})
        error = joiner.receive(5).fields["error"]
        waiting.join(5)
        assert not waiting.is_alive()
    finally:
        cluster.close()
    assert "has 1 slot for 2 workers that must lie on one host" in error["what"]
    assert "--slots 2" in error["fix"]
    invited = [text for text in said if "turned away" not in text]
    assert not invited or "waiting for 2 slots, 2 on one host as there is no `cluster.trusted_network`" in invited[0]


def _raise_if(over: bool) -> None:
    if over:
        raise Interrupted("that was all")


def test_a_stopped_worker_of_another_machine_is_not_waited_for(make_job: MakeJob, tmp_path: Path) -> None:
    """Its warm server tells, so that a minute of silence need not pass."""
    changes = {"train.steps": 10**6, "cluster.heartbeat": 0.2, "cluster.lost_after": 60.0}
    write(tmp_path, make_job, {**changes, "strategy.mesh": {"data": 2}}, MARKED)
    command = train(tmp_path, "--json")
    joiner = join(tmp_path, "--slots", "2")
    stopped = pids(tmp_path, 2, 40)[1]
    began = time.monotonic()
    os.kill(stopped, signal.SIGSTOP)
    out, errors = command.communicate(timeout=55)
    assert command.returncode == 3, errors
    assert time.monotonic() - began < 55
    what = json.loads(out)["cause"]["what"]
    silent = re.search(rf"\(pid {stopped} on 127.0.0.1\) has given no sign of life for (\d+) s", what)
    assert silent is not None, what
    assert int(silent[1]) < 30
    ended(joiner, 0)
    assert gone([stopped], 5)
