"""Ray's nodes as hosts: a cluster of its own on this machine, nodes that are lost, clusters open to anybody."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.joiners import VERBUND
from conftest import MakeJob, losses, wait_for
from processes import MARKED, gone, parent, pids
from verbund.cluster import ray as ours
from verbund.job import Job
from verbund.run import Run

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
RAY = {"cluster.kind": "ray", "strategy.mesh": {"data": 2}, "cluster.lost_after": 10.0, "cluster.heartbeat": 0.2}


@pytest.mark.parametrize(
    ("strategy", "nodes", "expected"),
    [
        ({"mesh": {"data": 6}}, None, [6]),
        ({"mesh": {"data": 5}}, 2, [2, 3]),
        ({"mesh": {"data": 2}, "islands": 3}, None, [2, 2, 2]),
        ({"mesh": {"data": 2}}, 4, [1, 1]),
    ],
)
def test_shares(strategy: dict[str, Any], nodes: int | None, expected: list[int], make_job: MakeJob) -> None:
    changes = {"cluster.kind": "ray", "cluster.trusted_network": "10.0.0.0/8", "strategy": strategy}
    job = make_job(changes={**changes, **({"cluster.nodes": nodes} if nodes else {})})
    assert ours.shares(job) == expected


def test_without_ray(make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours.importlib.util, "find_spec", lambda _: None)
    job = make_job(changes=RAY)
    with pytest.raises(Exception, match=re.escape("`pip install 'verbund[ray]'`")):
        cluster_of(job, tmp_path)


def cluster_of(job: Job, folder: Path) -> ours.RayCluster:
    return ours.RayCluster(job, folder, [], {}, lambda _: None)


@pytest.mark.parametrize(
    ("address", "environment", "refused"),
    [
        ("10.0.0.1:6379", {}, True),
        ("ray.example:6379", {"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": "x"}, True),
        ("10.0.0.1:6379", {"RAY_AUTH_MODE": "token"}, False),
        ("10.0.0.1:6379", {"RAY_AUTH_TOKEN_PATH": "/token"}, False),
        ("127.0.0.1:6379", {}, False),
    ],
)
def test_open_clusters(
    address: str, environment: dict[str, str], refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if refused:
        with pytest.raises(Exception, match="without a token: whoever reaches it could run code there"):
            ours._authentication(address)
    else:
        assert ours._authentication(address)[1] is None


def start(folder: Path, **environment: str) -> subprocess.Popen[str]:
    words = [*VERBUND, "train", "job.toml", "--run", "run", "--json"]
    here = {**os.environ, **environment}
    return subprocess.Popen(words, cwd=folder, env=here, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@needs_ray
def test_ray_on_this_machine(run_job: Callable[..., Run], make_job: MakeJob, tmp_path: Path) -> None:
    """Same numbers; whoever has no token is turned away; nothing is left."""
    alone = run_job(MARKED)
    for mark in tmp_path.glob("pid-*"):
        mark.unlink()
    (tmp_path / "job.toml").write_text(make_job(MARKED, RAY).toml())
    command = start(tmp_path, SLOW="0.3")
    worker = pids(tmp_path, 2, 90)[0]
    actor = parent(parent(worker))
    agents = parent(parent(actor))
    status, environment = (Path(f"/proc/{actor}/{file}").read_bytes().split(b"\0") for file in ("cmdline", "environ"))
    assert status[0].startswith(b"ray::Agent")
    assert b"RAY_AUTH_MODE=token" in environment
    assert b"ray_agents" in Path(f"/proc/{agents}/cmdline").read_bytes()
    address = Path(f"/proc/{parent(actor)}/cmdline").read_text().partition("--gcs-address=")[2].partition("\0")[0]
    stranger = f"import ray; ray.init(address={address!r})"
    without = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    without |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "wrong"}
    turned_away = subprocess.run([sys.executable, "-c", stranger], env=without, capture_output=True, timeout=60)
    assert turned_away.returncode != 0
    out, errors = command.communicate(timeout=90)
    assert command.returncode == 0, errors
    assert json.loads(out)["world"] == 2
    assert losses(Run.open(tmp_path / "run")) == pytest.approx(losses(alone), rel=1e-5)
    assert gone([worker, actor, agents], 10)


NODES = """
import sys
from ray.cluster_utils import Cluster
nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
others = [nodes.add_node(num_cpus=1) for _ in range(3)]
print(nodes.address, flush=True)
for line in sys.stdin:
    nodes.remove_node(next(node for node in others if str(node.node_id) == line.strip()), allow_graceful=False)
    print("removed", flush=True)
nodes.shutdown()
"""


@needs_ray
def test_a_node_is_lost(make_job: MakeJob, tmp_path: Path) -> None:
    """Of three nodes two have a worker; when one of these is lost, the third takes its place."""
    token = tmp_path / "token"
    token.write_text("t" * 64)
    auth = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    nodes = subprocess.Popen(
        [sys.executable, "-c", NODES],
        env={**os.environ, **auth},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert nodes.stdin is not None
    assert nodes.stdout is not None
    try:
        address = nodes.stdout.readline().strip()
        host = address.rpartition(":")[0]
        more = {"cluster.address": address, "cluster.nodes": 2, "cluster.trusted_network": f"{host}/32"}
        more |= {"train.steps": 10**6, "checkpoint.every": 3, "cluster.replacements": 3}
        (tmp_path / "job.toml").write_text(make_job(MARKED, {**RAY, **more}).toml())
        command = start(tmp_path, **auth)
        workers = pids(tmp_path, 2, 90)
        wait_for(lambda: any((tmp_path / "run" / "checkpoints").glob("step-*")), "a checkpoint", 30)
        actor = parent(parent(workers[1]))
        raylet = Path(f"/proc/{parent(actor)}/cmdline").read_text()
        node = re.search(r"--node[-_]id=([0-9a-f]+)", raylet)
        assert node is not None, raylet
        nodes.stdin.write(f"{node[1]}\n")
        nodes.stdin.flush()
        assert nodes.stdout.readline() == "removed\n"
        wait_for(lambda: len([pid for pid in pids(tmp_path, 1, 90) if pid not in workers]) >= 2, "other workers", 90)
        command.send_signal(signal.SIGINT)
        out, errors = command.communicate(timeout=60)
        assert command.returncode == 130, errors
        assert "training goes on from step" in errors
        assert json.loads(out)["status"] == "interrupted"
    finally:
        nodes.stdin.close()
        nodes.wait(30)
