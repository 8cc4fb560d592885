"""Runs over the hosts of a lab."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conftest import MLP, MakeJob, wait_for
from lab.network import Lab

VERBUND = [sys.executable, "-m", "verbund"]
ENDLESS = {"train.steps": 1_000_000, "checkpoint.every": "end", "cluster.heartbeat": 0.2}


def write(lab: Lab, make_job: MakeJob, folder: Path, changes: dict[str, Any], task: str = MLP) -> None:
    cluster = {
        "cluster.kind": "hosts",
        "cluster.hosts": lab.hosts,
        "cluster.command": "ip netns exec {host}",
        "cluster.trusted_network": lab.network,
        "strategy.mesh": {"data": len(lab.hosts)},
    }
    job = make_job(task, {**cluster, **changes})
    (folder / "job.toml").write_text(job.toml())


def train(lab: Lab, folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return lab.run(0, [*VERBUND, "train", "job.toml", "--run", "run", *more], cwd=folder, timeout=120)


def start(lab: Lab, folder: Path, hosts: Sequence[int] | None = None) -> subprocess.Popen[str]:
    """A run under way: all workers compute, on all hosts or on these."""
    command = lab.start(
        0,
        [*VERBUND, "train", "job.toml", "--run", "run", "--json"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )

    numbers = range(len(lab.hosts)) if hosts is None else hosts

    def computing() -> bool:
        return all(any((folder / f"pid-{pid}").exists() for pid in lab.pids(host)) for host in numbers)

    wait_for(lambda: command.poll() is not None or computing(), "all workers", 60)
    assert command.poll() is None, command.communicate()
    return command


def ended(command: subprocess.Popen[str], lab: Lab, hosts: list[int]) -> dict[str, Any]:
    """What a command that failed said, once nothing is left of it on those hosts."""
    out, errors = command.communicate(timeout=60)
    assert command.returncode == 3, errors
    assert not [pid for host in hosts for pid in lab.pids(host)]
    document = json.loads(out)
    assert isinstance(document, dict)
    return document
