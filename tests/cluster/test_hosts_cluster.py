"""A cluster of several hosts, here of two addresses of this machine: who may take part, and how processes meet."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from conftest import MakeJob
from verbund.cluster import forked, hosts
from verbund.cluster.host import check, versions
from verbund.cluster.hosts import HostsCluster
from verbund.cluster.keys import Keys
from verbund.cluster.process import ProcessSpec
from verbund.cluster.server import Host
from verbund.cluster.supervisor import Supervisor
from verbund.comm.rendezvous import Listener, Meeting, dial
from verbund.comm.wire import Secret, WireError
from verbund.errors import ClusterLost, InputError
from verbund.job import Job

HOSTS = ["127.0.0.1", "127.0.0.2"]
CHANGES = {
    "cluster.kind": "hosts",
    "cluster.hosts": HOSTS,
    "cluster.trusted_network": "127.0.0.0/8",
    "strategy.mesh": {"data": 2},
}


@contextmanager
def cluster_of(job: Job, folder: Path) -> Iterator[HostsCluster]:
    cluster = HostsCluster(job, folder, [], {})
    try:
        yield cluster
    finally:
        cluster.close()


def test_who_does_not_know_the_secret_is_turned_away(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job(changes=CHANGES)
    with cluster_of(job, tmp_path) as cluster:
        secret = cluster.meeting.secret
        assert secret is not None
        with pytest.raises(WireError, match="secret"):
            dial(replace(cluster.meeting, secret=Secret.create()), "worker", 0)
        for server in cluster._servers:
            for file in ("cmdline", "environ"):
                assert secret.value.hex().encode() not in Path(f"/proc/{server.pid}/{file}").read_bytes()
        specs = [ProcessSpec("worker", rank, 2, "verbund.stage.doctor:work") for rank in range(2)]
        results = Supervisor(cluster, job.cluster, lambda *_: None).run(specs)
        assert [result["sum"] for result in results] == [3.0, 3.0]
        assert list(cluster.free_memory()) == HOSTS


def test_a_name_outside_of_the_trusted_network(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job(changes={**CHANGES, "cluster.hosts": ["localhost"], "cluster.trusted_network": "10.0.0.0/8"})
    with pytest.raises(InputError, match=r"`localhost` has the address .*, which does not lie in"):
        HostsCluster(job, tmp_path, [], {})


def test_an_unknown_name(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job(changes={**CHANGES, "cluster.hosts": ["no-such-host.invalid"]})
    with pytest.raises(InputError, match=r"the host `no-such-host\.invalid` is not known"):
        HostsCluster(job, tmp_path, [], {})


UNUSABLE = [
    ("echo hello >&2; echo no route to {host} >&2; exit 255", "ended with status 255: no route to far"),
    ("echo unknown option -- z >&2; echo 'usage: ssh [-46]' >&2; exit 255", ": unknown option -- z"),
    ("exit 3", "ended with status 3. Try"),
    ("echo waiting >&2; sleep 60", "started nothing there within 1 s: waiting"),
]


@pytest.mark.parametrize(("script", "message"), UNUSABLE)
def test_a_host_that_is_not_reached(
    script: str, message: str, make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named with the command that was tried, what it said last, and what to do."""
    monkeypatch.setattr(forked, "WARM_SECONDS", 0.6)
    job = make_job(changes=CHANGES)
    monkeypatch.setattr(hosts, "_host", lambda name, _: Host("far", name, ("sh", "-c", script.format(host="far"))))
    with cluster_of(job, tmp_path) as cluster, pytest.raises(ClusterLost) as caught:
        cluster.fileno()
    text = str(caught.value)
    assert "host far cannot be used: `sh -c " in text
    assert message in text
    assert "-c 'import verbund'`, which must end without a question" in text
    assert "leave the host out of `cluster.hosts`" in text


def test_versions_are_compared() -> None:
    check("a", {"problem": None, "versions": versions()})
    with pytest.raises(InputError, match=r"host a: has torch 2\.0\.0 \(here "):
        check("a", {"problem": None, "versions": {**versions(), "torch": "2.0.0"}})
    with pytest.raises(InputError, match=r"host a: 10\.0\.0\.9 is no address of this host"):
        check("a", {"problem": "10.0.0.9 is no address of this host", "versions": versions()})


def test_a_store_answers_when_there_is_what_was_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All that torch's interface asks for, over a connection, from threads that wait for one another."""
    from datetime import timedelta

    from verbund.comm.store import Ask, Store
    from verbund.comm.wire import Array, Connection, Message

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    meeting = Meeting.create()
    listener, keys = Listener(meeting), Keys()
    ends: list[Connection] = []

    def serve(connection: Connection) -> None:
        while True:
            try:
                message = connection.receive()
            except WireError:
                return
            with lock:
                keys.answer(connection, message)

    lock = threading.Lock()

    def client() -> Ask:
        connection = dial(meeting, "worker", 0)
        accepted = listener.accept()
        assert accepted is not None
        ends.extend((connection, accepted[0]))
        threading.Thread(target=serve, args=(accepted[0],), daemon=True).start()

        def ask(kind: str, fields: dict[str, object], arrays: dict[str, Array], timeout: float) -> Message:
            connection.send(kind, {**fields, "number": 0}, None, **arrays)
            return connection.receive(timeout)

        return ask

    one, other = Store(client(), "s", 10.0), Store(client(), "s", 10.0)
    apart = Store(client(), "another", 0.1)
    timer = threading.Timer(0.1, lambda: one.set("a", b"\0value"))
    timer.start()
    assert other.get("a") == b"\0value"
    timer.join()  # its line is this thread's from now on
    other.wait(["a"], timedelta(seconds=1))
    assert other.check(["a"])
    assert not other.check(["a", "b"])
    assert [one.add("n", 2), other.add("n", 3)] == [2, 5]
    assert other.get("n") == b"5"
    assert one.compare_set("c", b"", b"1") == b"1"
    assert other.compare_set("c", b"0", b"2") == b"1"
    assert other.compare_set("c", b"1", b"2") == b"2"
    assert one.num_keys() == 3
    assert one.delete_key("c")
    assert not one.delete_key("c")
    with pytest.raises(RuntimeError, match="nobody has said a within"):
        apart.get("a")
    one.set("a", b"another")
    assert other.get("a") == b"another"  # as an address is, of which another process has become the owner
    asked: list[str] = []
    ask = client()

    def counted(kind: str, fields: dict[str, object], arrays: dict[str, Array], timeout: float) -> Message:
        asked.append(str(fields["what"]))
        return ask(kind, fields, arrays, timeout)

    for number in range(100):
        one.set(f"rank/{number}", str(number))
    late = Store(counted, "s", 10.0, once=True)
    for number in range(100):
        late.wait([f"rank/{number}"])
        assert late.get(f"rank/{number}") == str(number).encode()
    assert len(asked) == 2  # an answer tells up to 64 values
    assert late.get("n") == b"5"
    one.add("n", 1)
    assert late.get("n") == b"6"  # what is counted is asked for each time
    for end in ends:
        end.end()
    listener.close()
    meeting.remove()
