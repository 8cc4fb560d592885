"""Islands on hosts whose network is not trusted: the same numbers, over TLS alone, and whoever is lost is named."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import MLP, MakeJob, losses, wait_for
from lab import Lab, missing
from lab.runs import ENDLESS, VERBUND, ended, start, train, write
from processes import MARKED, gone
from trained import newest, parameters
from verbund.run import Run
from verbund.stage import launch

pytestmark = pytest.mark.skipif((why := missing()) is not None, reason=why or "")

ALONE = {
    "cluster.trusted_network": None,
    "strategy.mesh": {"data": 1},
    "strategy.islands": 2,
    "strategy.exchange": {"name": "diloco", "every": 2},
    "data.validation_fraction": 0.2,
    "validate.every": 3,
    "validate.metrics": ["accuracy", "f1", "roc_auc"],
}

SNIFF = """
import socket, sys
raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
raw.bind(("eth0", 0))
print("ready", flush=True)
begun = {}
while True:
    frame = raw.recv(65536)
    if frame[12:14] != b"\\x08\\x00" or frame[23] != 6:
        continue
    tcp = 14 + 4 * (frame[14] & 15)
    end = 14 + int.from_bytes(frame[16:18])
    data = frame[tcp + 4 * (frame[tcp + 12] >> 4) : end]
    flow = frame[26:34] + frame[tcp : tcp + 4]
    if frame[tcp + 13] & 2:
        begun[flow] = False
    elif data and not begun.get(flow, True):
        begun[flow] = True
        print("tls" if data[:2] == b"\\x16\\x03" else f"other {data[:20]}", flush=True)
"""


@pytest.mark.parametrize(
    ("hosts", "strategy"),
    [
        (2, {"strategy.mesh": {"data": 2}}),
        (2, {"strategy.mesh": {"tensor": 2}, "strategy.exchange": {"name": "local_sgd", "every": 2}}),
        (4, {"strategy.islands": 4}),
        (4, {"strategy.islands": 4, "strategy.exchange": {"name": "diloco", "every": 2, "compression": "int8"}}),
    ],
    ids=["2 of 2", "2 of 2 divided", "4", "4 compressed"],
)
def test_same_numbers_as_on_one_machine(
    hosts: int, strategy: dict[str, Any], make_job: MakeJob, tmp_path: Path, shared_cluster: object
) -> None:
    changes = {**ALONE, **strategy}
    here = {key: value for key, value in changes.items() if not key.startswith("cluster")}
    alone = launch.train(make_job(MLP, here), tmp_path / "alone")
    with Lab(hosts=hosts, rate="100mbit") as lab:
        write(lab, make_job, tmp_path, changes)
        done = train(lab, tmp_path)
        assert done.returncode == 0, done.stderr
        assert not [pid for host in range(hosts) for pid in lab.pids(host)]
    run = Run.open(tmp_path / "run")
    assert losses(run) == pytest.approx(losses(alone), rel=1e-6, abs=1e-6)
    for name, metric in alone.summary["metrics"].items():
        assert run.summary["metrics"][name]["last"] == pytest.approx(metric["last"], rel=1e-6, abs=1e-6), name
    expected = parameters(alone)
    for name, found in parameters(run).items():
        torch.testing.assert_close(found, expected[name], rtol=1e-6, atol=1e-6)
    moved = [link["sent"] for link in run.summary["network"]["links"]]
    assert len(moved) == hosts * (hosts - 1)
    assert all(count > 1000 for count in moved), moved


def test_only_tls_crosses(lab: Lab, make_job: MakeJob, tmp_path: Path) -> None:
    write(lab, make_job, tmp_path, {**ALONE, **ENDLESS, "strategy.mesh": {"data": 2}}, MARKED)
    watching = lab.start(1, [sys.executable, "-c", SNIFF], stdout=subprocess.PIPE)
    assert watching.stdout is not None
    assert watching.stdout.readline() == "ready\n"
    command = start(lab, tmp_path)

    def workers() -> int:
        return sum((tmp_path / f"pid-{pid}").exists() for host in (0, 1) for pid in lab.pids(host))

    wait_for(lambda: workers() == 4, "all workers")
    for host in (0, 1):
        shown = lab.run(host, ["cat", "/proc/net/tcp", "/proc/net/tcp6"]).stdout.splitlines()
        rows = [line.split() for line in shown if ":" in line.split()[0]]
        listening = [row[1] for row in rows if row[3] == "0A" and not row[1].startswith("0100007F")]
        assert len(listening) == (1 if host == 0 else 0), listening  # the supervisor
    command.send_signal(signal.SIGINT)
    _, errors = command.communicate(timeout=30)
    assert command.returncode == 130, errors
    watching.kill()
    seen = watching.communicate()[0].splitlines()
    assert len(seen) > 4
    assert set(seen) == {"tls"}, seen


def test_a_cut_link_is_named_and_the_run_goes_on_later(lab: Lab, make_job: MakeJob, tmp_path: Path) -> None:
    limits = {"cluster.lost_after": 4.0, "cluster.orphan_grace": 1.0, "checkpoint.every": 5}
    write(lab, make_job, tmp_path, {**ALONE, **ENDLESS, **limits}, MARKED)
    command = start(lab, tmp_path)
    wait_for(lambda: (tmp_path / "run" / "checkpoints" / "latest").exists(), "a checkpoint")
    beyond = lab.pids(1)
    lab.cut(1)
    document = ended(command, lab, [0])
    assert document["cause"]["what"].startswith(f"host {lab.hosts[1]} is lost with worker 1: ")
    assert gone(beyond, 10)
    lab.restore(1)
    with newest(Run.open(tmp_path / "run")) as found:
        steps = found.step + 4
    done = lab.run(0, [*VERBUND, "resume", "run", "--set", f"train.steps={steps}"], cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert Run.open(tmp_path / "run").summary["steps"] == steps


def test_a_worker_that_fails_is_the_cause(lab: Lab, make_job: MakeJob, tmp_path: Path) -> None:
    task = (
        MLP
        + """
import os

def inputs(batch):
    if os.environ.get("RANK_HOST") == "1":
        raise ValueError("no more")
    return batch["x"]
"""
    )
    command = "ip netns exec {host} env RANK_HOST=1"
    write(lab, make_job, tmp_path, {**ALONE, "cluster.command": command}, task)
    done = train(lab, tmp_path)
    assert done.returncode == 1, done.stderr
    assert "ValueError: no more" in done.stderr
