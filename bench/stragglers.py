"""Data-parallel training with one slow worker of four: even shares, shares by speed, and what could be had at best.

    sudo python bench/stragglers.py --data mnist-10k.parquet [--share 0.4] [--steps 80] [--rounds 3]

A ConvNet learns digits in global batches of 256. Each of the four workers has a share of a core (cgroup v1,
`cpu.cfs_quota_us`; needs root), the last one a quarter of that. The ideal is the speed of a run in which all have whole
shares, in proportion to the sum of the shares: 3.25 of 4. The runs take turns; the speed is samples per second of
the second half of the steps, when shares have settled; `whole` counts all steps but the first five. The curves of a
round are compared step by step.

Prints a line a run on standard error and one JSON line, of medians, on standard output.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from quotas import ENTER, check, limits
from verbund.observe.events import SPANS
from verbund.observe.journal import read
from verbund.run import Run

WORKERS, BATCH, ROWS = 4, 256, 8_000
SLOWER, PERIOD, WARM_UP = 4, 20_000, 5
ROWS_OF = {
    "all alike": ("none", False),
    "even": ("none", True),
    "rebalance": ("rebalance", True),
}
"""The setting `stragglers`, and whether a worker is slow."""
TASK = """
from torch import nn

def model():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 49, 10),
    )

def inputs(batch):
    limit()
    return batch["image"].float().view(-1, 1, 28, 28) / 255
"""
JOB = """
task = "task.py"
[data]
train = "train.parquet"
input = "image"
target = "label"
cache = "cache"
[train]
objective = "cross_entropy"
global_batch = {batch}
steps = {steps}
optimizer = {{ name = "sgd", lr = 0.05 }}
[strategy]
mesh = {{ data = {workers} }}
stragglers = "{stragglers}"
[validate]
every = "end"
[checkpoint]
every = "end"
[cluster]
threads = 1
"""


def speed(run: Run, first: int) -> float:
    """Samples per second from the end of the step `first` to that of the last one."""
    ends: dict[int, int] = {}
    worker = next(j for j in read(run.path / "journal") if j.role == "worker" and j.rank == 0)
    kinds, steps, begun, length = worker.spans.T
    computing = kinds == SPANS.index("compute")
    for step, end in zip(steps[computing].tolist(), (begun + length)[computing].tolist(), strict=True):
        ends[step] = max(ends.get(step, 0), end)
    last = max(ends)
    samples = worker.steps[(worker.steps[:, 0] > first) & (worker.steps[:, 0] <= last), 3].sum()
    seconds = (ends[last] - ends[first]) / 1e9
    return float(samples) / seconds


def trained(folder: Path, row: str, given: argparse.Namespace) -> dict[str, Any]:
    """One run: how fast it was, and its losses."""
    stragglers, slow = ROWS_OF[row]
    run = folder / "run"
    job = JOB.format(batch=BATCH, steps=given.steps, workers=WORKERS, stragglers=stragglers)
    (folder / "job.toml").write_text(job)
    shares = [given.share] * (WORKERS - 1) + [given.share / (SLOWER if slow else 1)]
    with limits(shares, PERIOD) as group:
        (folder / "task.py").write_text((ENTER + TASK).format(run=run, group=group))
        command = [sys.executable, "-m", "verbund", "train", "job.toml", "--run", str(run), "--quiet"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{row}: {done.stderr}")
    opened = Run.open(run)
    events = [event for journal in read(run / "journal") for event in journal.events if event["name"] == "shares"]
    found = {
        "samples_per_second": round(speed(opened, given.steps // 2), 1),
        "whole": round(speed(opened, WARM_UP), 1),
        "shares": events[-1]["samples"] if events else None,
        "changes": len(events),
        "found": opened.summary["stragglers"]["found"],
        "losses": [loss for _, loss in opened.summary["loss"]["curve"]],
    }
    shown = {key: value for key, value in found.items() if key != "losses"}
    print(json.dumps({"row": row, **shown}), file=sys.stderr, flush=True)
    subprocess.run(["rm", "-rf", str(run)], check=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="Parquet with the columns image and label")
    parser.add_argument("--share", type=float, default=0.4, help="of a core, for each worker")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--rounds", type=int, default=1)
    given = parser.parse_args()
    check()
    rounds: list[dict[str, dict[str, Any]]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pq.write_table(pq.read_table(given.data).slice(0, ROWS), folder / "train.parquet")
        for _ in range(given.rounds):
            rounds.append({row: trained(folder, row, given) for row in ROWS_OF})

    def median(row: str, key: str) -> float:
        return float(statistics.median(each[row][key] for each in rounds))

    ideal = median("all alike", "samples_per_second") * (WORKERS - 1 + 1 / SLOWER) / WORKERS
    curves = [[np.array(each[row]["losses"]) for row in ("even", "rebalance")] for each in rounds]
    result = {
        "bench": "stragglers",
        "even": median("even", "samples_per_second"),
        "rebalance": median("rebalance", "samples_per_second"),
        "rebalance_whole": median("rebalance", "whole"),
        "ideal": round(ideal, 1),
        "ratio": round(median("rebalance", "samples_per_second") / ideal, 3),
        "ratio_even": round(median("even", "samples_per_second") / ideal, 3),
        "shares": rounds[-1]["rebalance"]["shares"],
        "curves_differ": max(float(np.max(np.abs(a - b) / np.abs(a))) for a, b in curves),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[0]:.1f}",
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
