"""Ray's nodes as hosts: a cluster of its own on this machine, nodes that are lost, clusters open to anybody."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cluster.joiners import VERBUND
from conftest import MakeJob, losses, wait_for
from processes import MARKED, alive, gone, parent, passes, pids
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
    """Same numbers, on a Ray of its own, whatever else is named; who has no token is turned away; nothing is left."""
    alone = run_job(MARKED)
    for mark in tmp_path.glob("pid-*"):
        mark.unlink()
    (tmp_path / "job.toml").write_text(make_job(MARKED, RAY).toml())
    command = start(tmp_path, SLOW="0.3", RAY_ADDRESS="127.0.0.1:1")
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
    if line.strip() == "head":
        nodes.head_node.kill_all_processes(check_alive=False, allow_graceful=False)
    else:
        nodes.remove_node(next(node for node in others if str(node.node_id) == line.strip()), allow_graceful=False)
    print("removed", flush=True)
for node in nodes.list_all_nodes():
    node.kill_all_processes(check_alive=False, allow_graceful=False)
"""
WITHOUT_HEAD = 8
"""Seconds that Ray's nodes live on without their head; by default 60."""


@dataclass
class Nodes:
    """A Ray cluster of a head without room and three nodes with room for a worker each, on this machine."""

    address: str
    environment: dict[str, str]
    process: subprocess.Popen[str]

    def remove(self, name: str) -> None:
        """Kills all processes of the head, or of the node with this id."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(name, file=self.process.stdin, flush=True)
        assert self.process.stdout.readline() == "removed\n"

    def start(self, make_job: MakeJob, folder: Path, **changes: Any) -> subprocess.Popen[str]:
        """Two workers on two nodes, which train until they are told to stop."""
        more = {"cluster.address": self.address, "cluster.nodes": 2, "train.steps": 10**6, "checkpoint.every": 3}
        more["cluster.trusted_network"] = f"{self.address.rpartition(':')[0]}/32"
        (folder / "job.toml").write_text(make_job(MARKED, {**RAY, **more, **changes}).toml())
        return start(folder, **self.environment)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    token = tmp_path_factory.mktemp("ray") / "token"
    token.write_text("t" * 64)
    environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    process = subprocess.Popen(
        [sys.executable, "-c", NODES],
        env={**os.environ, **environment, "RAY_gcs_rpc_server_reconnect_timeout_s": str(WITHOUT_HEAD)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield Nodes(process.stdout.readline().strip(), environment, process)
    finally:
        process.stdin.close()
        process.wait(30)


def raylet_of(worker: int) -> str:
    """The id of the node that a worker is on."""
    raylet = Path(f"/proc/{parent(parent(parent(worker)))}/cmdline").read_text()
    node = re.search(r"--node[-_]id=([0-9a-f]+)", raylet)
    assert node is not None, raylet
    return node[1]


@needs_ray
def test_an_actor_and_a_node_are_lost(nodes: Nodes, make_job: MakeJob, tmp_path: Path) -> None:
    """Of three nodes two have a worker. A killed actor begins again; of a lost node the third takes the place."""
    command = nodes.start(make_job, tmp_path, **{"cluster.replacements": 5})
    workers = pids(tmp_path, 2, 90)

    def others(known: list[int]) -> list[int]:
        there = pids(tmp_path, 2, 90)
        return there if set(there) != set(known) and passes(tmp_path, 2) > 3 else []

    wait_for(lambda: any((tmp_path / "run" / "checkpoints").glob("step-*")), "a checkpoint", 30)
    os.kill(parent(parent(workers[0])), signal.SIGKILL)
    again = list(wait_for(lambda: others(workers), "a worker of another actor", 90))
    node = raylet_of(again[1])
    nodes.remove(node)
    last = list(wait_for(lambda: others(again), "a worker on another node", 90))
    assert node not in map(raylet_of, last)
    command.send_signal(signal.SIGINT)
    out, errors = command.communicate(timeout=60)
    assert command.returncode == 130, errors
    assert "its Ray actor" in errors or "goes on" in errors
    assert json.loads(out)["status"] == "interrupted"


@needs_ray
def test_the_head_is_lost(nodes: Nodes, make_job: MakeJob, tmp_path: Path) -> None:
    """Training goes on, even when Ray's nodes have given up; the next loss ends it; it resumes without Ray."""
    command = nodes.start(make_job, tmp_path, **{"cluster.replacements": 5})
    workers = pids(tmp_path, 2, 90)
    raylets = [parent(parent(parent(worker))) for worker in workers]
    nodes.remove("head")
    wait_for(lambda: not any(map(alive, raylets)), "the end of Ray's nodes", WITHOUT_HEAD + 60)
    before = passes(tmp_path, 2)
    wait_for(lambda: passes(tmp_path, 2) > before + 50, "more steps without Ray", 60)
    assert pids(tmp_path, 2) == workers
    os.kill(parent(parent(workers[0])), signal.SIGKILL)
    out, errors = command.communicate(timeout=60)
    assert command.returncode == 3, errors
    told = re.search(r"Ray cannot be used any more: its head at \S+ is lost: .*nobody takes the place", errors)
    assert told is not None, errors
    assert re.search(r"Ray cannot be used: its head at \S+ is lost", json.loads(out)["cause"]["what"]), out
    assert gone(workers, 10)
    step = max(int(path.name[5:]) for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    words = [*VERBUND, "resume", "run", "--cluster", "local", "--set", f"train.steps={step + 2}", "--json"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == step + 2
