"""A machine loses its power while replicas train: how long until the others are told, and until another is a member.

Hosts are network namespaces of this machine (`tests/lab`): one has the command, three join a job for two workers, and
the link of one that computes is cut and its processes are killed. Needs root. No peer: what others do about it ends the
run or restarts it from a checkpoint.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from lab import Lab, missing

LOST_AFTER = 3.0
ROUNDS = 3
TASK = """
import os, pathlib, time
from torch import nn

def model():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

def inputs(batch):
    time.sleep(0.01)
    pathlib.Path(__file__).with_name(f"pid-{os.getpid()}").touch()
    return batch["image"]
"""
JOB = """
task = "task.py"
data = {{ train = "sklearn:digits", input = "image", target = "label", cache = "cache" }}
train = {{ objective = "cross_entropy", global_batch = 64, steps = 1000000 }}
validate = {{ every = "end" }}
checkpoint = {{ every = "end" }}
strategy = {{ mesh = {{ data = 2 }} }}

[cluster]
kind = "external"
join_file = "here"
listen = "{listen}:0"
trusted_network = "{network}"
lost_after = {lost_after}
"""
VERBUND = [sys.executable, "-m", "verbund"]


def measure(folder: Path) -> dict[str, float]:
    """Seconds from the loss of power until it is noticed, the others are told, and a waiting machine is a member."""
    (folder / "task.py").write_text(TASK)
    with Lab(hosts=4) as lab:
        job = JOB.format(listen=lab.hosts[0], network=lab.network, lost_after=LOST_AFTER)
        (folder / "job.toml").write_text(job)

        def computes(host: int) -> bool:
            return any((folder / f"pid-{pid}").exists() for pid in lab.pids(host))

        def start(host: int, *words: str) -> subprocess.Popen[str]:
            return lab.start(host, [*VERBUND, *words], cwd=folder, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

        command = start(0, "train", "job.toml", "--run", "run")
        wait(lambda: (folder / "here").exists())
        joiners = [start(host, "join", "./here", "--secret-file", "here.secret") for host in (1, 2, 3)]
        wait(lambda: sum(computes(host) for host in (1, 2, 3)) == 2)
        time.sleep(2.0)  # the third has loaded everything
        victim = next(host for host in (1, 2, 3) if computes(host))
        began = time.time()
        lab.kill(victim)
        wait(lambda: len(eras(folder)) >= 3)
        command.terminate()
        for process in (command, *joiners):
            process.wait(60)
    _, alone, both = eras(folder)[:3]
    loss = next(event for event in events(folder) if event["name"] == "replacement")
    return {
        "noticed": loss["wall"] - began,
        "others_told": alone["wall"] - began,
        "replaced": both["wall"] - began,
    }


def events(folder: Path) -> list[dict[str, Any]]:
    """Of the supervisor's journal."""
    lines = [
        line for path in (folder / "run" / "journal").glob("supervisor-*") for line in path.read_text().splitlines()
    ]
    return [event for event in map(json.loads, lines) if event["t"] == "event"]


def eras(folder: Path) -> list[dict[str, Any]]:
    """The memberships that there have been."""
    return [event for event in events(folder) if event["name"] == "membership"]


def wait(condition: Any, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit("what was waited for did not come")
        time.sleep(0.02)


def main() -> None:
    if (why := missing()) is not None:
        raise SystemExit(why)
    found = []
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as folder:
            found.append(measure(Path(folder)))
    medians = {key: round(statistics.median(one[key] for one in found), 2) for key in found[0]}
    print(json.dumps({"lost_after": LOST_AFTER, "rounds": ROUNDS, "seconds": medians}))


if __name__ == "__main__":
    main()
