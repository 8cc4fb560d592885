"""Data-parallel training against torchrun + DistributedDataParallel on gloo: 2 workers, same model, same data.

    python bench/data_parallel.py [--models mlp-256,mlp-1024,mlp-4096,convnet] [--rounds 3]

Both sides are run in turn, as whole commands. Prints one JSON line: per model the seconds from the command to the
end of
the first step, and the steady steps per second (from step 20 on), ours, the peer's, and their ratio; medians over the
rounds. The peer holds the samples as tensors in memory and indexes them, which is the fastest that a user would write.
`of_apart` is the share of the speed of two trainings side by side that do not communicate at all, with the same samples
each.
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
import time
from pathlib import Path
from typing import Any

import numpy as np

WORKERS = 2
BATCH = 64
WARM_UP = 20
ROWS = 10_000
MODELS = {
    "mlp-256": (
        "nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))",
        400,
    ),
    "mlp-1024": (
        "nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))",
        200,
    ),
    "mlp-4096": (
        "nn.Sequential(nn.Linear(784, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 10))",
        50,
    ),
    "convnet": (
        (
            "nn.Sequential(nn.Unflatten(1, (1, 28)), nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), "
            "nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1568, 10))"
        ),
        200,
    ),
}

PEER = """
import json, os, sys, time
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    data = np.load(sys.argv[1])
    x, y = torch.from_numpy(data["x"]), torch.from_numpy(data["y"])
    torch.manual_seed(0)
    model = DistributedDataParallel({model}, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss_of = nn.CrossEntropyLoss()
    generator = torch.Generator().manual_seed(0)
    steps, stamps = int(sys.argv[2]), []
    for step in range(steps):
        if step * {batch} * world % len(x) < {batch} * world:
            order = torch.randperm(len(x), generator=generator)
        start = step * {batch} * world % (len(x) - {batch} * world) + rank * {batch}
        ids = order[start:start + {batch}]
        loss = loss_of(model(x[ids]), y[ids])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()
        stamps.append(time.monotonic_ns())
    if rank == 0:
        print(json.dumps([stamps[0], stamps[{warm}], stamps[-1]]))
    dist.barrier()  # else a rank that ends first may take the other down
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""

TASK = """
from torch import nn

def model():
    return {model}
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
steps = {steps}
optimizer = {{ name = "sgd", lr = 0.01 }}
check_replicas = 0
[checkpoint]
every = "end"
[strategy]
mesh = {{ data = {workers} }}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.models.split(","):
            results[name] = compare(name, arguments.rounds, Path(folder) / name)
    print(json.dumps({"bench": "data_parallel", "workers": WORKERS, "machine": machine(), "models": results}))


def compare(name: str, rounds: int, folder: Path) -> dict[str, Any]:
    """Runs both sides in turn; the medians."""
    model, steps = MODELS[name]
    folder.mkdir()
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, 28, 28) if name == "convnet" else (ROWS, 784)).astype(np.float32)
    np.savez(folder / "data.npz", x=x, y=random.integers(0, 10, ROWS))
    (folder / "peer.py").write_text(PEER.format(model=model, batch=BATCH, warm=WARM_UP))
    (folder / "task.py").write_text(TASK.format(model=model))
    (folder / "job.toml").write_text(JOB.format(batch=BATCH * WORKERS, steps=steps, workers=WORKERS))
    (folder / "apart.toml").write_text(JOB.format(batch=BATCH, steps=steps, workers=1))
    ours, theirs, apart = [], [], []
    for number in range(rounds):
        ours.append(run_ours(folder, steps, number))
        theirs.append(run_peer(folder, steps))
        apart.append(run_apart(folder, steps, number))
    figures: dict[str, Any] = {}
    for index, key in enumerate(("seconds_to_first_step", "steps_per_second")):
        mine = statistics.median(run[index] for run in ours)
        peer = statistics.median(run[index] for run in theirs)
        figures[key] = {"ours": round(mine, 3), "peer": round(peer, 3), "ratio": round(mine / peer, 3)}
    speed = statistics.median(apart)
    figures["steps_per_second"] |= {"apart": round(speed, 3), "of_apart": round(mine / speed, 3)}
    return figures


def run_ours(folder: Path, steps: int, number: int) -> tuple[float, float]:
    """Seconds to the end of the first step, and steps per second after the warm-up."""
    start = time.monotonic_ns()
    subprocess.run(command("job.toml", f"run-{number}"), cwd=folder, check=True, capture_output=True)
    done = ends(folder / f"run-{number}")
    return figures_of(start, done[0], done[WARM_UP], done[steps - 1], steps)


def run_apart(folder: Path, steps: int, number: int) -> float:
    """Steps per second of trainings side by side that have one worker and one thread each; their mean."""
    runs = [f"apart-{number}-{worker}" for worker in range(WORKERS)]
    started = [
        subprocess.Popen(
            [*command("apart.toml", run), "--set", "cluster.threads=1"], cwd=folder, stdout=subprocess.DEVNULL
        )
        for run in runs
    ]
    statuses = [process.wait() for process in started]
    if any(statuses):
        raise SystemExit("a training failed")
    speeds = []
    for run in runs:
        done = ends(folder / run)
        speeds.append(figures_of(0, done[0], done[WARM_UP], done[steps - 1], steps)[1])
    return statistics.mean(speeds)


def command(job: str, run: str) -> list[str]:
    return [sys.executable, "-m", "verbund", "train", job, "--quiet", "--run", run]


def ends(run: Path) -> dict[int, int]:
    """When the first worker had done each step."""
    done: dict[int, int] = {}
    for line in (run / "journal" / "worker-0-1.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["t"] == "spans":
            rows = np.array(record["rows"]).reshape(-1, 4)
            for kind, step, begun, length in rows.tolist():
                if kind == 0:
                    done[step] = max(done.get(step, 0), begun + length)
    return done


def run_peer(folder: Path, steps: int) -> tuple[float, float]:
    start = time.monotonic_ns()
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(WORKERS),
        "--standalone",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launcher, "peer.py", "data.npz", str(steps)], cwd=folder, capture_output=True, text=True, env=environment
    )
    if done.returncode:
        raise SystemExit(f"the peer failed:\n{done.stderr}")
    first, warm, last = json.loads(done.stdout.splitlines()[-1])
    return figures_of(start, first, warm, last, steps)


def figures_of(start: int, first: int, warm: int, last: int, steps: int) -> tuple[float, float]:
    return (first - start) / 1e9, (steps - 1 - WARM_UP) / ((last - warm) / 1e9)


def machine() -> str:
    return f"{os.cpu_count()} cores, {platform.machine()}, Linux {platform.release()}"


if __name__ == "__main__":
    main()
