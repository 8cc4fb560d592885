"""Goodput under faults: what a training gets done of what its living workers could do.

    sudo python bench/goodput.py [--seconds 600] [--every 20] [--workers 8] [--share 0.2] [--seed 1] [--torchrun]

Worker processes train an MLP, each with a share of a core of its own from when it loads the task (cgroup v1,
`cpu.cfs_quota_us`; needs root): those that take the places of others too, so that what they load costs them as much
time as a worker has. First they train undisturbed for `--calm` seconds. Then every `--every` seconds one, chosen by
the seed, meets with a fault, also chosen: SIGKILL, SIGSTOP for half a minute, or SIGTERM, the notice of a preemption.
The goodput is the samples of the steps that were done, divided by the undisturbed rate times the time, counting of
each moment only the share of the workers that live then and are not stopped, joining ones among them. When a step was
done, the spans of the journals tell; that no step is missing, the curve. One JSON line.

How fast undisturbed workers are drifts by some percent within minutes, on a virtual machine more than elsewhere. So the
rate is looked at in the second half of each interval between two faults too, and the larger of both counts.

With `--torchrun` the same schedule meets DistributedDataParallel under torchrun (`goodput_torchrun.py`). A restart ends
all its workers, so that for a moment none lives who could do anything: beside the goodput there is what each side got
done of what undisturbed workers would have in the time (`of_undisturbed`), and how many seconds that sets it back.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import goodput_torchrun as peer
from quotas import GROUPS, check
from verbund.observe.events import SPANS
from verbund.observe.journal import read

PERIOD = 20_000
BATCH = 256
STOPPED_SECONDS = 30.0
FAULTS = (signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM)
TASK = """
import os
from pathlib import Path
from torch import nn

group = Path(f"{prefix}-{{os.getpid()}}")
group.mkdir(exist_ok=True)
(group / "cpu.cfs_period_us").write_text("{period}")
(group / "cpu.cfs_quota_us").write_text("{quota}")
(group / "cgroup.procs").write_text(str(os.getpid()))

def model():
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
"""
JOB = """
task = "task.py"
[data]
train = "data.npz"
input = "x"
target = "y"
cache = "cache"
[train]
objective = "cross_entropy"
global_batch = {batch}
steps = 10000000
optimizer = {{ name = "adamw", lr = 1e-3 }}
[checkpoint]
every = "end"
[strategy]
mesh = {{ data = {workers} }}
[cluster]
threads = 1
heartbeat = 0.5
replacements = 1000000
"""


def main() -> None:
    """Measures, and prints the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="of faults")
    parser.add_argument("--every", type=float, default=20.0)
    parser.add_argument("--calm", type=float, default=30.0)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--share", type=float, default=0.2, help="of a core, for each worker")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--torchrun", action="store_true", help="measure the peer too")
    parser.add_argument("--save-every", type=float, default=2.0, help="seconds between two saves of the peer")
    given = parser.parse_args()
    check()
    prefix = GROUPS / f"verbund-goodput-{os.getpid()}"
    try:
        with tempfile.TemporaryDirectory(prefix="verbund-bench-") as folder:
            found = measure(Path(folder), prefix, given)
            if given.torchrun:
                found["torchrun"] = measure_peer(Path(folder), prefix, given)
            print(json.dumps(found))
    finally:
        for group in GROUPS.glob(f"{prefix.name}-*"):
            group.rmdir()


def measure(folder: Path, prefix: Path, given: argparse.Namespace) -> dict[str, Any]:
    """The run and what it comes to."""
    generator = np.random.default_rng(given.seed)
    x = generator.normal(size=(8192, 256)).astype(np.float32)
    np.savez(folder / "data.npz", x=x, y=x[:, :10].argmax(1))
    (folder / "task.py").write_text(TASK.format(prefix=prefix, period=PERIOD, quota=int(PERIOD * given.share)))
    (folder / "job.toml").write_text(JOB.format(batch=BATCH, workers=given.workers))
    words = [sys.executable, "-m", "verbund", "train", str(folder / "job.toml"), "--run", str(folder / "run"), "-q"]
    command = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    try:
        calm, storm, faults, alive = _disturb(
            command, lambda: len(_trained(folder)) >= given.workers, lambda: _workers(command.pid), given
        )
    finally:
        command.send_signal(signal.SIGINT)
        errors = command.communicate(timeout=120)[1]
    if command.returncode != 130:
        raise SystemExit(errors)
    ends = _ends(folder / "run" / "journal")
    summary = json.loads((folder / "run" / "summary.json").read_text())
    return {
        "bench": "goodput",
        "workers": given.workers,
        "seconds": round(storm[1] - storm[0], 1),
        "faults": {fault.name: faults.count(fault) for fault in dict.fromkeys(FAULTS)},
        **_of(ends, calm, storm, alive, given.every),
        "worker_seconds_lost": summary["membership"]["seconds_lost"],
        "steps_redone": summary["membership"]["steps_redone"],
        "steps_missing": summary["steps"] - len(ends),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[0]:.1f}",
    }


def measure_peer(folder: Path, prefix: Path, given: argparse.Namespace) -> dict[str, Any]:
    """The same under torchrun."""
    quota = int(PERIOD * given.share)
    command = peer.start(folder, prefix, PERIOD, quota, BATCH, given.workers, given.save_every)
    try:
        calm, storm, _, alive = _disturb(
            command, lambda: len(peer.steps(folder)[0]) > 0, lambda: _running(_children(command.pid)), given
        )
    finally:
        for pid in _children(command.pid):
            _strike(pid, signal.SIGCONT)
        command.send_signal(signal.SIGINT)
        try:
            command.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            for pid in [*_children(command.pid), command.pid]:
                _strike(pid, signal.SIGKILL)
            command.communicate()
    ends, again = peer.steps(folder)
    return {**_of(ends, calm, storm, alive, given.every), "steps_redone": again}


def _of(
    ends: np.ndarray[Any, Any], calm: tuple[float, float], storm: tuple[float, float], alive: float, every: float
) -> dict[str, float]:
    """What the times at which steps were done come to; `alive` is the integral of the living share."""

    def samples(since: float, until: float) -> int:
        return int(((ends > since) & (ends <= until)).sum()) * BATCH

    seconds = storm[1] - storm[0]
    before = samples(*calm) / (calm[1] - calm[0])
    quiet = [storm[0] + (number + 0.5) * every for number in range(int(seconds / every))]
    between = sum(samples(since, since + every / 2) for since in quiet) / (len(quiet) * every / 2) if quiet else 0.0
    rate, done = max(before, between), samples(*storm)
    return {
        "undisturbed_samples_per_second": round(before, 1),
        "between_faults_samples_per_second": round(between, 1),
        "samples": done,
        "living_share": round(alive / seconds, 4),
        "goodput": round(done / (rate * alive), 4),
        "of_undisturbed": round(done / (rate * seconds), 4),
        "seconds_behind": round(seconds - done / rate, 2),
    }


def _disturb(
    command: subprocess.Popen[str],
    trains: Callable[[], bool],
    workers: Callable[[], list[int]],
    given: argparse.Namespace,
) -> tuple[tuple[float, float], tuple[float, float], list[signal.Signals], float]:
    """Begin and end of the undisturbed and of the disturbed time, the faults, and the integral of the living share."""
    choose = random.Random(given.seed)
    _wait(trains, command)
    time.sleep(5.0)
    calm = time.monotonic()
    time.sleep(given.calm)
    storm = now = time.monotonic()
    faults: list[signal.Signals] = []
    stopped: dict[int, float] = {}
    alive = 0.0
    while now < storm + given.seconds:
        if command.poll() is not None:
            raise SystemExit("the training has ended")
        former, now = now, time.monotonic()
        living = workers()
        alive += (now - former) * min(len(living), given.workers) / given.workers
        for pid in [pid for pid, until in stopped.items() if now > until]:
            del stopped[pid]
            _strike(pid, signal.SIGCONT)
        if now > storm + len(faults) * given.every and living:
            fault = choose.choice(FAULTS)
            victim = choose.choice(living)
            faults.append(fault)
            _strike(victim, fault)
            if fault is signal.SIGSTOP:
                stopped[victim] = now + STOPPED_SECONDS
        time.sleep(0.02)
    return (calm, storm), (storm, now), faults, alive


def _ends(journal: Path) -> np.ndarray[Any, Any]:
    """When each step was done, the last worker's, in seconds of the monotonic clock."""
    last: dict[int, int] = {}
    for each in read(journal):
        if each.role == "worker":
            for kind, step, start, length in each.spans.tolist():
                if kind == SPANS.index("compute"):
                    last[step] = max(last.get(step, 0), start + length)
    return np.array([last[step] for step in sorted(last)]) / 1e9


def _trained(folder: Path) -> list[Path]:
    return list((folder / "run" / "journal").glob("worker-*.jsonl"))


def _workers(command: int) -> list[int]:
    """The pids of the warm server's children that live and are not stopped."""
    return _running([pid for server in _children(command) for pid in _children(server)])


def _running(pids: list[int]) -> list[int]:
    return [pid for pid in pids if _state(pid) not in "TZX"]


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def _strike(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _wait(condition: Any, command: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 120.0
    while not condition():
        if command.poll() is not None or time.monotonic() > until:
            command.kill()
            raise SystemExit(command.communicate()[1])
        time.sleep(0.05)


if __name__ == "__main__":
    main()
