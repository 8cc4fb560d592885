"""Parameter servers with one slow worker of four: accuracy after the same samples, samples per second, staleness.

    sudo python bench/parameter_server_stragglers.py --data mnist-10k.parquet [--rows "NAME;…"] [--rates 0.15,0.4]

An MLP 784-256-256-10 learns 7,936 digits for some epochs by plain SGD and is asked for 2,000 others. Each of the four
workers has a share of a core (cgroup v1, `cpu.cfs_quota_us`; needs root): all the same, or the last a quarter of it.
Server and coordinator have no limit, but the machine's cores. Synchronous and bounded rows divide global batches of 128
into four times 32 samples; asynchronous ones take a step with each worker's 32, so that all make passes of the same
size, and asynchronous rows four times as many steps in an epoch. All have the same grid of learning rates, and each
takes its best by accuracy with all workers alike and keeps it with the slow one. The speed is that of the same run,
from when every worker has done its fifth ticket until the last has ended; shares that were not used do not count. The
server writes no log.

Prints a line a run on standard error and one JSON line on standard output.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from quotas import ENTER, check, limits
from verbund.observe.events import SPANS
from verbund.observe.journal import ProcessJournal, read
from verbund.run import Run

WORKERS, BATCH = 4, 32
ROWS, HELD = 248 * BATCH, 2_000
SLOWER, PERIOD, WARM_UP = 4, 20_000, 5
SERVED = f"islands={WORKERS},exchange=parameter_server,exchange.log=false"
BULK = "exchange.consistency=bulk_synchronous"
ASYNCHRONOUS = "exchange.consistency=asynchronous"
STRATEGIES = {
    "synchronous": (BULK, WORKERS),
    "synchronous, backup 1": (f"{BULK},exchange.backup=1", WORKERS),
    "bounded_staleness": ("exchange.consistency=bounded_staleness", WORKERS),
    "asynchronous": (ASYNCHRONOUS, 1),
    "asynchronous, staleness_aware": (f"{ASYNCHRONOUS},exchange.staleness_aware=true", 1),
    "asynchronous, delay_compensation": (f"{ASYNCHRONOUS},exchange.delay_compensation=0.04", 1),
}
"""Settings of the exchange, and how many workers share a global batch."""
TASK = """
from torch import nn

def model():
    return nn.Sequential(
        nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )

def inputs(batch):
    limit()
    return batch["image"].float() / 255
"""
JOB = """
task = "task.py"
seed = {seed}
[data]
train = "train.parquet"
validation = "held.parquet"
input = "image"
target = "label"
cache = "cache"
[train]
objective = "cross_entropy"
global_batch = {batch}
epochs = {epochs}
optimizer = {{ name = "sgd", lr = {rate} }}
[validate]
every = "end"
metrics = ["accuracy"]
[checkpoint]
every = "end"
[cluster]
threads = 1
"""


def tickets(journal: ProcessJournal) -> list[int]:
    """When a worker's tickets ended: with their push."""
    kinds, steps, begun, length = journal.spans.T
    computed = set(steps[kinds == SPANS.index("compute")].tolist())
    last: dict[int, int] = {}
    for step, end in zip(steps.tolist(), (begun + length).tolist(), strict=True):
        if step in computed:
            last[step] = max(last.get(step, 0), end)
    return sorted(last.values())


def trained(folder: Path, row: str, slow: bool, rate: float, given: argparse.Namespace) -> dict[str, Any]:
    """One run: what it reached, and how fast."""
    strategy, sharing = STRATEGIES[row]
    run = folder / "run"
    job = JOB.format(seed=given.seed, batch=BATCH * sharing, epochs=given.epochs, rate=rate)
    (folder / "job.toml").write_text(job)
    shares = [given.share] * (WORKERS - 1) + [given.share / (SLOWER if slow else 1)]
    with limits(shares, PERIOD) as group:
        (folder / "task.py").write_text((ENTER + TASK).format(run=run, group=group))
        command = [sys.executable, "-m", "verbund", "train", "job.toml", "--run", str(run), "--quiet"]
        done = subprocess.run(
            [*command, "--strategy", f"{SERVED},{strategy}"], cwd=folder, capture_output=True, text=True
        )
    if done.returncode:
        raise SystemExit(f"{row}: {done.stderr}")
    summary = Run.open(run).summary
    ends = [tickets(journal) for journal in read(run / "journal") if journal.role == "worker"]
    begun, ended = max(each[WARM_UP - 1] for each in ends), max(each[-1] for each in ends)
    late = summary["servers"]["late"]
    count = sum(sum(begun < end for end in each) for each in ends) - late
    staleness = summary["servers"]["staleness"]
    found = {
        "accuracy": round(summary["metrics"]["accuracy"]["last"], 4),
        "samples_per_second": round(count * BATCH / ((ended - begun) / 1e9)),
        "staleness": staleness["mean"],
        "staleness_max": staleness["max"],
        "late": late,
        "skipped": summary["servers"]["skipped"],
        "tickets": [len(each) for each in ends],
    }
    print(json.dumps({"row": row, "slow": slow, "rate": rate, **found}), file=sys.stderr, flush=True)
    subprocess.run(["rm", "-rf", str(run)], check=True)
    return found


def rows_of(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for row in given.rows.split(";"):
        tried = {rate: trained(folder, row, False, rate, given) for rate in map(float, given.rates.split(","))}
        rate = max(tried, key=lambda each: tried[each]["accuracy"])
        results[row] = {"rate": rate, "alike": tried[rate], "one_slow": trained(folder, row, True, rate, given)}
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="Parquet with the columns image and label")
    parser.add_argument("--rows", default=";".join(STRATEGIES), help="names, with semicolons between them")
    parser.add_argument("--rates", default="0.15,0.4")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--share", type=float, default=0.2, help="of a core, for each worker")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    check()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        table = pq.read_table(given.data)
        pq.write_table(table.slice(0, ROWS), folder / "train.parquet")
        pq.write_table(table.slice(len(table) - HELD), folder / "held.parquet")
        results = rows_of(folder, given)
    machine = f"{os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[0]:.1f}"
    print(json.dumps({"bench": "parameter_server_stragglers", "machine": machine, "rows": results}))


if __name__ == "__main__":
    main()
