"""Runs over several hosts: the same numbers, and whatever is lost is named and leaves nothing behind."""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import time
from pathlib import Path
from typing import Literal

import pytest

from conftest import MLP, MakeJob, losses, wait_for
from lab import Lab, missing
from lab.runs import ENDLESS, VERBUND, ended, start, train, write
from processes import MARKED, gone, step_of
from trained import close
from verbund.run import Run
from verbund.stage import launch

pytestmark = pytest.mark.skipif((why := missing()) is not None, reason=why or "")


@pytest.mark.parametrize(("hosts", "mesh"), [(2, {"data": 4}), (4, {"data": 2, "tensor": 2})])
def test_same_numbers_as_one_process(
    hosts: int, mesh: dict[str, int], make_job: MakeJob, tmp_path: Path, shared_cluster: object
) -> None:
    alone = launch.train(make_job(MLP, {"validate.every": 2}), tmp_path / "alone")
    with Lab(hosts=hosts, rate="100mbit") as lab:
        write(lab, make_job, tmp_path, {"strategy.mesh": mesh, "validate.every": 2})
        done = train(lab, tmp_path)
        assert done.returncode == 0, done.stderr
        assert not [pid for host in range(hosts) for pid in lab.pids(host)]
    run = Run.open(tmp_path / "run")
    assert losses(run) == pytest.approx(losses(alone), rel=1e-5)
    assert run.summary["world"] == 4


def test_a_host_without_power(make_job: MakeJob, tmp_path: Path) -> None:
    with Lab(hosts=3) as lab:
        write(lab, make_job, tmp_path, {**ENDLESS, "cluster.lost_after": 3.0}, MARKED)
        command = start(lab, tmp_path)
        lab.kill(2)
        document = ended(command, lab, [0, 1])
    assert document["cause"]["what"].startswith(f"host {lab.hosts[2]} is lost with worker 2: ")


@pytest.mark.parametrize("way", ["both", "from"])
def test_a_cut_link_is_named_and_both_sides_end(
    way: Literal["both", "from"], lab: Lab, make_job: MakeJob, tmp_path: Path
) -> None:
    """Whether it loses only what comes from the host, or all: each side hears no acknowledgement."""
    write(lab, make_job, tmp_path, {**ENDLESS, "cluster.lost_after": 4.0, "cluster.orphan_grace": 1.0}, MARKED)
    command = start(lab, tmp_path)
    began = time.time()
    beyond = lab.pids(1)
    lab.cut(1, way)
    document = ended(command, lab, [0])
    assert document["failures"][0]["time"] - began < 4.0 + 0.5  # a turn of the supervisor, on a busy machine
    assert document["cause"]["what"].startswith(f"host {lab.hosts[1]} is lost with worker 1: ")
    assert gone(beyond, 10)


def test_two_hosts_that_do_not_reach_each_other_any_more(make_job: MakeJob, tmp_path: Path) -> None:
    """In one direction, and the command reaches both: what is between them is named long before the step's deadline."""
    with Lab(hosts=3) as lab:
        changes = {"cluster.hosts": lab.hosts[1:], "strategy.mesh": {"data": 2}, "cluster.lost_after": 2.0}
        write(lab, make_job, tmp_path, {**ENDLESS, **changes}, MARKED)
        command = start(lab, tmp_path, [1, 2])
        lab.cut_between(1, 2)
        document = ended(command, lab, [0, 1, 2])
        addresses = lab.hosts[1:]
    what = document["cause"]["what"]
    assert "nothing was acknowledged for" in what
    assert all(address in what for address in addresses)


def test_a_link_that_is_slow_and_loses_all_now_and_then(
    make_job: MakeJob, tmp_path: Path, shared_cluster: object
) -> None:
    """10 Mbit/s, and nothing at all for a second, twice: slower, never wrong."""
    wide = MARKED.replace("16", "2000")
    alone = launch.train(make_job(wide, {"train.steps": 24}), tmp_path / "alone")
    with Lab(hosts=2, rate="10mbit") as lab:
        changes = {"train.steps": 24, "cluster.heartbeat": 0.2, "cluster.lost_after": 6.0, "cluster.replacements": 3}
        write(lab, make_job, tmp_path, changes, wide)
        command = start(lab, tmp_path)
        for step in (5, 14):
            wait_for(lambda step=step: step_of(tmp_path) >= step, "some steps", 60)  # type: ignore[misc]
            lab.cut(1)
            time.sleep(1)  # that long it loses everything
            lab.restore(1)
        out, errors = command.communicate(timeout=90)
    assert command.returncode == 0, errors
    summary = json.loads(out)
    assert (summary["steps"], summary["failures"], summary["membership"]["replacements"]) == (24, [], [])
    assert losses(Run.open(tmp_path / "run")) == pytest.approx(losses(alone), rel=1e-5)


def test_nothing_is_left_of_a_killed_command(lab: Lab, make_job: MakeJob, tmp_path: Path) -> None:
    write(lab, make_job, tmp_path, {**ENDLESS, "cluster.orphan_grace": 1.0}, MARKED)
    command = start(lab, tmp_path)
    everything = [pid for host in range(2) for pid in lab.pids(host)]
    assert len(everything) >= 5  # the command, two warm servers, two workers
    command.kill()
    command.communicate(timeout=20)
    assert gone(everything, 10)


def test_a_worker_of_another_host_is_killed(lab: Lab, make_job: MakeJob, tmp_path: Path) -> None:
    write(lab, make_job, tmp_path, ENDLESS, MARKED)
    command = start(lab, tmp_path)
    worker = next(pid for pid in lab.pids(1) if (tmp_path / f"pid-{pid}").exists())
    lab.run(1, ["kill", "-9", str(worker)])
    document = ended(command, lab, [0, 1])
    assert f"worker 1 (pid {worker} on {lab.hosts[1]}) was killed by SIGKILL" in document["cause"]["what"]


def test_workers_of_both_hosts_are_killed_and_replaced(
    lab: Lab, make_job: MakeJob, tmp_path: Path, shared_cluster: object
) -> None:
    """Those of the other host hear of it from nobody but the supervisor: what they wait in is between hosts."""
    changes = {"strategy.mesh": {"data": 4}, "cluster.replacements": 9, "cluster.threads": 1}
    write(lab, make_job, tmp_path, {**ENDLESS, **changes}, MARKED)
    command = start(lab, tmp_path)
    dead: list[int] = []

    def computing() -> list[int]:
        now = time.time()
        marks = [tmp_path / f"pid-{pid}" for host in range(2) for pid in lab.pids(host) if pid not in dead]
        fresh = [int(mark.name[4:]) for mark in marks if mark.exists() and now - mark.stat().st_mtime < 1.0]
        return fresh if len(fresh) == 4 else []

    for host, number in ((1, 0), (0, 1), (1, 1)):
        fresh = wait_for(computing, "four workers", 60)
        workers = [pid for pid in sorted(lab.pids(host)) if pid in fresh]
        dead.append(workers[number % len(workers)])
        lab.run(host, ["kill", "-9", str(dead[-1])])
    wait_for(computing, "four workers", 60)
    command.send_signal(signal.SIGINT)
    _, errors = command.communicate(timeout=60)
    assert command.returncode == 130, errors
    run = Run.open(tmp_path / "run")
    assert len(run.summary["membership"]["replacements"]) == 3
    found = losses(run)
    assert run.summary["steps"] == len(found)
    alone = launch.train(make_job(MLP, {"train.steps": len(found)}), tmp_path / "alone")
    assert found == pytest.approx(losses(alone), rel=1e-5)


def test_interrupted_over_hosts_and_resumed_on_one(
    lab: Lab, make_job: MakeJob, tmp_path: Path, shared_cluster: object
) -> None:
    write(lab, make_job, tmp_path, ENDLESS, MARKED)
    command = start(lab, tmp_path)
    command.send_signal(signal.SIGINT)
    out, errors = command.communicate(timeout=30)
    assert command.returncode == 130, errors
    assert not [pid for host in range(2) for pid in lab.pids(host)]
    steps = json.loads(out)["steps"]
    more = {"train.steps": steps + 2, "cluster.kind": "local"}
    assert launch.resume(tmp_path / "run", more).summary["steps"] == steps + 2


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("sh -c 'echo no way to {host} >&2; exit 255'", "ended with status 255: no way to"),
        ("no-such-program {host}", "`no-such-program` cannot be run: No such file"),
        ("false", "`false` ended with status 1"),
    ],
)
def test_a_command_that_reaches_no_host(
    command: str, message: str, lab: Lab, make_job: MakeJob, tmp_path: Path
) -> None:
    write(lab, make_job, tmp_path, {"cluster.command": command})
    done = train(lab, tmp_path)
    assert done.returncode == 3, done.stderr
    assert f"host {lab.hosts[1]} cannot be used: " in done.stderr
    assert message in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_host_that_sees_the_task_alone(
    lab: Lab, make_job: MakeJob, tmp_path: Path, temporary: Path, shared_cluster: object
) -> None:
    """It has the data sent, and its journal and its part of the save are the command's."""
    alone = launch.train(make_job(MLP, {"data.validation_fraction": 0.2}), tmp_path / "alone")
    shutil.rmtree(tmp_path / "cache")  # as its tests have left it
    hidden = [tmp_path / "cache", tmp_path / "run"]
    for folder in hidden:
        folder.mkdir()
    hide = " && ".join(f"mount -t tmpfs none {shlex.quote(str(folder))}" for folder in hidden)
    inside = shlex.quote(f'{hide} && exec "$@"')
    command = f"ip netns exec {{host}} env XDG_CACHE_HOME={temporary} sh -c {inside} -"
    write(lab, make_job, tmp_path, {"cluster.command": command, "data.validation_fraction": 0.2})
    done = train(lab, tmp_path)
    assert done.returncode == 0, done.stderr
    run = Run.open(tmp_path / "run")
    assert losses(run) == pytest.approx(losses(alone), rel=1e-5)
    close(run, alone, 1e-5)
    assert [path.name for path in (temporary / "verbund").iterdir()] == ["data"]
    assert {path.name for path in run.journal.iterdir()} >= {"worker-0-1.jsonl", "worker-1-1.jsonl"}


def test_a_host_with_another_python_path(lab: Lab, make_job: MakeJob, tmp_path: Path) -> None:
    write(lab, make_job, tmp_path, {"cluster.command": "ip netns exec {host} env PYTHONPATH=/nowhere HOME=/nowhere"})
    (other := tmp_path / "other" / "verbund").mkdir(parents=True)
    source = Path(launch.__file__).parent.parent
    for path in source.rglob("*.py"):
        target = other / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(path.read_text())
    (other / "newer.py").write_text("")
    write(lab, make_job, tmp_path, {"cluster.command": f"ip netns exec {{host}} env PYTHONPATH={other.parent}"})
    done = train(lab, tmp_path)
    assert done.returncode == 2, done.stderr
    assert f"host {lab.hosts[1]}: has verbund " in done.stderr


def test_a_run_over_hosts_is_resumed_predicted_with_and_exported(lab: Lab, make_job: MakeJob, tmp_path: Path) -> None:
    changes = {"strategy.islands": 2, "strategy.mesh": {"data": 1}, "strategy.exchange": {"name": "diloco", "every": 2}}
    write(lab, make_job, tmp_path, {**changes, "data.validation_fraction": 0.2, "cluster.heartbeat": 0.2})
    verbs = [
        ["train", "job.toml", "--run", "run"],
        ["resume", "run", "--set", "train.steps=7"],
        ["predict", "run", "data.npz"],
        ["export", "run", "--out", "model"],
    ]
    for arguments in verbs:
        done = lab.run(0, [*VERBUND, *arguments], cwd=tmp_path, timeout=120)
        assert done.returncode == 0, (arguments, done.stderr)
        assert not [pid for host in range(2) for pid in lab.pids(host)]
    assert Run.open(tmp_path / "run").summary["steps"] == 7
    assert (tmp_path / "run" / "predictions.parquet").exists()
    assert (tmp_path / "model" / "model.safetensors").exists()
