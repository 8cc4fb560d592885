"""How soon a training goes on after a worker was killed, and how soon another has taken its place.

    python bench/recovery.py [--workers 4] [--kills 10] [--seed 1]

A small network is trained by worker processes of this machine, in steps of about `--step` milliseconds and what they
compute. Again and again one of them, chosen by the seed, is ended by SIGKILL, while all take part. Two times are
measured from the kill, on the machine's monotonic clock: until all survivors have begun the first step that they take
without the lost one (`next_step`), and until the process that takes its place computes its first samples
(`replaced`). The task tells of the steps: each worker appends the time to a file of its own, so that nothing of the
system's own records is trusted. Afterwards the loss of every step is compared with that of an undisturbed run of the
same job. One JSON line: medians and maxima in seconds, steps that are missing, and the largest relative difference of
a loss, in float64: in float32 AdamW makes full steps of the rounding of gradients that are nearly zero, and
undisturbed runs of one and of four workers differ by a thousandth.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

_TASK = """
import os, pathlib, time
from torch import nn

HERE = pathlib.Path(__file__).parent / "marks"
STEP = float(os.environ["STEP_SECONDS"])
_mark = None

def model():
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))

def inputs(batch):
    global _mark
    if _mark is None:
        _mark = open(HERE / str(os.getpid()), "a", buffering=1)
    _mark.write(f"{time.monotonic()}\\n")
    time.sleep(STEP)
    return batch["x"]
"""
_DEADLINE = 60.0


def main() -> None:
    """Measures, and prints the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--step", type=float, default=20.0, help="milliseconds of a step besides computing")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="verbund-bench-") as folder:
        print(json.dumps(measure(Path(folder), given)))


def measure(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Both runs, and what they come to."""
    generator = np.random.default_rng(given.seed)
    x = generator.normal(size=(4096, 64)).astype(np.float32)
    np.savez(folder / "data.npz", x=x, y=x[:, :10].argmax(1))
    (folder / "task.py").write_text(_TASK)
    disturbed = Training(folder, "disturbed", given, steps=0)
    choose = random.Random(given.seed)
    next_steps, replaced = [], []
    try:
        for _ in range(given.kills):
            pids = disturbed.wait(lambda: _full(disturbed, given.workers), "all workers")
            time.sleep(choose.uniform(0.0, 0.3))  # at any place of a step
            victim = choose.choice(pids)
            before = {pid: len(disturbed.marks(pid)) for pid in pids}
            killed = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            survivors = [pid for pid in pids if pid != victim]
            # A survivor has begun at most one step with the lost one since then; two more are without it.
            disturbed.wait(
                lambda s=survivors, b=before: all(len(disturbed.marks(pid)) > b[pid] + 3 for pid in s), "more steps"
            )
            next_steps.append(_gap_end(disturbed, survivors, killed) - killed)
            new = disturbed.wait(lambda p=pids: set(disturbed.living()) - set(p), "another process")
            replaced.append(min(disturbed.marks(pid)[0] for pid in new) - killed)
    finally:
        disturbed.stop()
    found = disturbed.losses()
    undisturbed = Training(folder, "undisturbed", given, steps=len(found))
    undisturbed.finish()
    expected = undisturbed.losses()
    numbers = [step for step, _ in found]
    return {
        "bench": "recovery",
        "workers": given.workers,
        "kills": given.kills,
        "next_step": _spread(next_steps),
        "replaced": _spread(replaced),
        "steps": len(found),
        "steps_missing": len(set(range(numbers[-1] + 1)) - set(numbers)),
        "loss_difference": max(abs(a - b) / abs(b) for (_, a), (_, b) in zip(found, expected, strict=True)),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
    }


def _full(training: Training, workers: int) -> list[int]:
    """The pids if all workers compute: each has done so within the last moments."""
    pids = training.living()
    now = time.monotonic()
    fresh = [pid for pid in pids if (marks := training.marks(pid)) and len(marks) > 3 and now - marks[-1] < 0.5]
    return pids if len(fresh) == workers else []


def _gap_end(training: Training, survivors: list[int], killed: float) -> float:
    """When all survivors had begun their first step after the longest pause that followed the kill."""
    ends = []
    for pid in survivors:
        marks = training.marks(pid)
        first = next(i for i, mark in enumerate(marks) if mark > killed)
        pauses = [(marks[i] - marks[i - 1], marks[i]) for i in range(max(first, 1), min(first + 3, len(marks)))]
        ends.append(max(pauses)[1])
    return max(ends)


def _spread(seconds: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(seconds), 3), "max": round(max(seconds), 3)}


class Training:
    """A training in a process of its own."""

    def __init__(self, folder: Path, name: str, given: argparse.Namespace, steps: int) -> None:
        self._marks, self._run = folder / "marks", folder / name
        for old in self._marks.glob("*"):
            old.unlink()
        self._marks.mkdir(exist_ok=True)
        (folder / "job.toml").write_text(
            f'task = "task.py"\n[data]\ntrain = "data.npz"\ninput = "x"\ntarget = "y"\ncache = "cache"\n'
            f'[train]\nobjective = "cross_entropy"\nglobal_batch = 64\nprecision = "fp64"\nsteps = {steps or 10**6}\n'
            f'optimizer = {{ name = "adamw", lr = 1e-3 }}\n[checkpoint]\nevery = "end"\n'
            f"[strategy]\nmesh = {{ data = {given.workers} }}\n"
            f"[cluster]\nthreads = 1\nreplacements = {10 * given.kills}\n"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-m", "verbund", "train", str(folder / "job.toml"), "--run", str(self._run), "--quiet"],
            env={**os.environ, "STEP_SECONDS": str(given.step / 1e3 if steps == 0 else 0.0)},
            stderr=subprocess.PIPE,
            text=True,
        )

    def living(self) -> list[int]:
        """The pids of workers that live and have computed."""
        return sorted(pid for path in self._marks.iterdir() if _alive(pid := int(path.name)) and self.marks(pid))

    def marks(self, pid: int) -> list[float]:
        """When a worker began its steps."""
        lines = (self._marks / str(pid)).read_text().split("\n")[:-1]
        return [float(line) for line in lines]

    def wait(self, condition: Any, what: str) -> Any:
        """What `condition` gives as soon as that is true."""
        until = time.monotonic() + _DEADLINE
        while not (value := condition()):
            if self._process.poll() is not None or time.monotonic() > until:
                self._process.kill()
                raise SystemExit(f"{what} did not come: {self._process.communicate()[1]}")
            time.sleep(0.01)
        return value

    def stop(self) -> None:
        """Ctrl-C: it saves and ends."""
        self._process.send_signal(signal.SIGINT)
        self._process.communicate(timeout=_DEADLINE)

    def finish(self) -> None:
        """Waits for its end."""
        errors = self._process.communicate(timeout=10 * _DEADLINE)[1]
        if self._process.returncode:
            raise SystemExit(errors)

    def losses(self) -> list[tuple[int, float]]:
        """Step and loss, of all steps that the run's curve has; whole up to 2000 steps."""
        summary = json.loads((self._run / "summary.json").read_text())
        return [(int(step), float(loss)) for step, loss in summary["loss"]["curve"]]


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


if __name__ == "__main__":
    main()
