"""The warm server, which forks all workers and tells how they ended: stopped, killed, or late."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from conftest import MakeJob, wait_for
from processes import MARKED, alive, children, gone, parent, pids, start_command, write_job
from verbund.cluster import forked
from verbund.cluster.local import LocalCluster
from verbund.cluster.process import ProcessSpec
from verbund.errors import ClusterLost
from verbund.run import Run

LIMITS = {"cluster.stop_grace": 0.5, "cluster.heartbeat": 0.2}


def test_stopped_before_it_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked, "WARM_SECONDS", 0.5)
    cluster = LocalCluster()
    server = cluster.server.pid
    os.kill(server, signal.SIGSTOP)
    with pytest.raises(ClusterLost, match=rf"warm server \(pid {server}\) did not start within .* it is stopped"):
        cluster.start([ProcessSpec("worker", 0, 1, "verbund.stage.train:work")])
    cluster.close()
    assert not alive(server)
    assert not cluster.scratch.exists()


def test_who_shares_a_host(shared_cluster: LocalCluster) -> None:
    roles = ["worker", "worker", "server"]
    specs = [ProcessSpec(role, number % 2, 2, "x:y") for number, role in enumerate(roles)]
    found = [shared_cluster._on_host(spec, [0, 0, 0], roles, number) for number, spec in enumerate(specs)]
    assert [(spec.place, spec.neighbours, spec.residents) for spec in found] == [(0, 2, 3), (1, 2, 3), (0, 1, 3)]


def test_stopped_before_it_forks() -> None:
    cluster = LocalCluster()
    server = cluster.server.pid
    cluster.fileno()  # it has come
    os.kill(server, signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(ClusterLost, match=rf"warm server \(pid {server}\) did not fork in time: it is stopped"):
        cluster.start([ProcessSpec("worker", 0, 1, "verbund.stage.train:work")], timeout=0.5)
    cluster.close()
    assert time.monotonic() - start < 5
    assert not alive(server)


def test_killed_before_it_has_started() -> None:
    cluster = LocalCluster()
    os.kill(cluster.server.pid, signal.SIGKILL)
    with pytest.raises(ClusterLost, match="was killed by SIGKILL before it had started"):
        cluster.fileno()
    cluster.close()
    assert not cluster.scratch.exists()


def test_stopped_at_the_end_nothing_is_lost(make_job: MakeJob, tmp_path: Path) -> None:
    write_job(make_job, tmp_path, {"strategy.mesh": {"data": 2}, "train.steps": 60, **LIMITS})
    command = start_command(tmp_path)
    workers = pids(tmp_path, 2)
    server = parent(workers[0])
    os.kill(server, signal.SIGSTOP)
    _, errors = command.communicate(timeout=30)
    assert command.returncode == 0
    assert f"the warm server (pid {server}) does not tell that worker 0, worker 1 have ended: it is stopped" in errors
    run = Run.open(tmp_path / "run")
    assert run.summary["status"] == "done"
    assert run.summary["steps"] == 60
    assert any("does not tell" in warning for warning in run.summary["warnings"])
    assert gone([*workers, server], 5)


def test_stopped_while_a_worker_is_killed(make_job: MakeJob, tmp_path: Path) -> None:
    write_job(make_job, tmp_path, {"strategy.mesh": {"data": 2}, "train.steps": 1_000_000, **LIMITS})
    command = start_command(tmp_path)
    workers = pids(tmp_path, 2)
    server = parent(workers[0])
    os.kill(server, signal.SIGSTOP)
    os.kill(workers[1], signal.SIGKILL)
    _, errors = command.communicate(timeout=30)
    assert command.returncode == 3, errors
    assert "the warm server" in errors
    assert "worker 1" in errors
    assert gone([*workers, server], 5)


def test_stopped_during_the_dry_run(make_job: MakeJob, tmp_path: Path) -> None:
    task = MARKED + "(HERE / 'loaded').touch()\ntime.sleep(2)\n"
    write_job(make_job, tmp_path, LIMITS, task)
    command = start_command(tmp_path)
    wait_for((tmp_path / "loaded").exists, "the dry run")
    (server,) = children(command.pid)
    os.kill(server, signal.SIGSTOP)
    _, errors = command.communicate(timeout=40)
    assert command.returncode == 3
    assert "does not tell that preflight 0 has ended: it is stopped" in errors
    assert "resume" not in errors
    assert not (tmp_path / "run").exists()
    assert gone([server], 5)
