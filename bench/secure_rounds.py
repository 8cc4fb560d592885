"""What secure aggregation costs a round with real clients: the commands themselves, on this machine, with and without.

    python bench/secure_rounds.py [--clients 4] [--rounds 8] [--width 256]

A network of three layers (`--width` 1024 has 1.1 million parameters) is trained by clients that are processes, each
with 64 samples; prints one JSON line: seconds and bytes of a round, in the second to the last round.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

TASK = """
from torch import nn


def model():
    middle = [nn.Linear({width}, {width}), nn.ReLU()]
    return nn.Sequential(nn.Linear(64, {width}), nn.ReLU(), *middle, nn.Linear({width}, 10))
"""
JOB = """
task = "task.py"
[data]
input = ["x"]
target = "y"
[train]
objective = "cross_entropy"
global_batch = 32
steps = {rounds}
optimizer = {{ name = "sgd", lr = 0.05 }}
[strategy.exchange]
name = "federated"
clients = {clients}
rule = {{ name = "fedavg", weights = "uniform" }}
{secure}
"""
POLICY = 'tasks = ["*"]\n'


def main() -> None:
    """Parses, plays both, prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="secure-rounds-") as folder:
        plain = played(Path(folder) / "plain", given, "")
        secure = played(Path(folder) / "secure", given, "secure = { threshold = 0.6 }")
    print(
        json.dumps(
            {
                "benchmark": "secure_rounds",
                "clients": given.clients,
                "parameters": 64 * given.width + given.width**2 + 10 * given.width + 2 * given.width + 10,
                "plain": plain,
                "secure": secure,
                "seconds_ratio": round(secure["seconds"] / plain["seconds"], 2),
                "bytes_ratio": round(secure["bytes_up"] / plain["bytes_up"], 2),
                "cpus": os.cpu_count(),
            }
        )
    )


def played(folder: Path, given: argparse.Namespace, secure: str) -> dict[str, Any]:
    """Holds a federation; seconds of a round, and the bytes that a client sends in it."""
    folder.mkdir()
    (folder / "task.py").write_text(TASK.format(width=given.width))
    (folder / "job.toml").write_text(JOB.format(rounds=given.rounds, clients=given.clients, secure=secure))
    (folder / "policy.toml").write_text(POLICY)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    federate = [sys.executable, "-m", "verbund", "federate"]
    processes = []
    names = [f"client-{number}" for number in range(given.clients)]
    try:
        for name in names:
            token = ["enroll", "--name", name, "--out", f"{name}.token", "--quiet"]
            subprocess.run([*federate, *token], cwd=folder, check=True)
        serving = ["server", "job.toml", "--listen", address, "--run", "run", "--quiet"]
        processes.append(subprocess.Popen([*federate, *serving], cwd=folder, stdout=subprocess.DEVNULL))
        random = np.random.default_rng(0)
        for name in names:
            x, y = random.normal(size=(64, 64)).astype(np.float32), random.integers(0, 10, 64)
            np.savez(folder / f"{name}.npz", x=x, y=y)
            own = ["--data", f"{name}.npz", "--home", name, "--token", f"{name}.token", "--policy", "policy.toml"]
            command = [*federate, "client", "--server", address, *own, "--quiet"]
            processes.append(subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL))
        times = stepped(folder / "run" / "federated" / "audit.jsonl", given.rounds, processes)
        for process in processes:
            if process.wait(60.0):
                raise SystemExit(f"{process.args!r} ended with {process.returncode}")
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()
    summary = json.loads((folder / "run" / "summary.json").read_text())
    rows = summary["rounds"]["table"][1:]
    return {
        "seconds": round((times[-1] - times[0]) / (len(times) - 1), 3),
        "bytes_up": round(sum(row["bytes"]["up"] for row in rows) / len(rows) / given.clients),
    }


def stepped(log: Path, rounds: int, processes: list[subprocess.Popen[bytes]]) -> list[float]:
    """When each round was done."""
    times: list[float] = []
    deadline = time.monotonic() + 300.0
    while len(times) < rounds:
        done = log.read_text().count('"event":"stepped"') if log.exists() else 0
        times += [time.monotonic()] * (done - len(times))
        if time.monotonic() > deadline or any(process.poll() for process in processes):
            raise SystemExit("a process has failed, or the rounds took too long")
        time.sleep(0.01)
    return times


if __name__ == "__main__":
    main()
