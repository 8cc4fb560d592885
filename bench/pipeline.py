"""A pipeline of 2 stages and 8 micro-batches: the bubble beside the theory's, the speed beside torch's own schedules.

    python bench/pipeline.py [--schedules gpipe,1f1b] [--rounds 3]

Both sides train the same transformer, cut in the middle, as whole commands in turn. Prints one JSON line: per schedule
our measured and theoretical bubble, and the steps per second of both sides (medians over the rounds) with their ratio.
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

LAYERS, WIDTH, HEADS, LENGTH, BATCH, MICRO_BATCHES, STEPS, WARM_UP = 8, 256, 4, 64, 32, 8, 9, 2
# Of one run of either side, in seconds: on two cores that nobody else uses it takes about ten.
DEADLINE = 120
PEERS = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B"}

MODEL = f"""
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer({WIDTH}, {HEADS}, {4 * WIDTH}, dropout=0.0, batch_first=True)
            for _ in range({LAYERS})
        )
        self.head = nn.Linear({WIDTH}, 10)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))

def model():
    return Model()
"""

JOB = f"""
task = "task.py"
[data]
train = "data.npz"
input = "x"
target = "y"
cache = "cache"
[train]
objective = "cross_entropy"
global_batch = {BATCH}
steps = {STEPS}
optimizer = {{ name = "sgd", lr = 0.01 }}
[checkpoint]
every = "end"
[strategy]
mesh = {{ pipeline = 2 }}
balance = "memory"
"""

PEER = f"""
import json, sys, time
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, {{schedule}}
from task import model

class Half(nn.Module):
    def __init__(self, whole, rank):
        super().__init__()
        self.blocks = whole.blocks[: {LAYERS // 2}] if rank == 0 else whole.blocks[{LAYERS // 2} :]
        self.head = whole.head if rank else None

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(x.mean(1))

def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    data = np.load("data.npz")
    x, y = torch.from_numpy(data["x"]), torch.from_numpy(data["y"])
    torch.manual_seed(0)
    part = Half(model(), rank)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.01)
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule = {{schedule}}(stage, {MICRO_BATCHES}, loss_fn=nn.CrossEntropyLoss())
    stamps = []
    for step in range({STEPS}):
        ids = torch.arange({BATCH}) + step * {BATCH} % (len(x) - {BATCH})
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(x[ids])
        else:
            schedule.step(target=y[ids], losses=[])
        optimizer.step()
        stamps.append(time.monotonic())
    if rank == 1:
        print(json.dumps([stamps[{WARM_UP}], stamps[-1]]))
    dist.barrier()
    dist.destroy_process_group()

main()
"""


def ours(folder: Path, schedule: str, number: int) -> tuple[float, dict[str, Any]]:
    """Steps per second after the warm-up, and what the summary says of the pipeline."""
    run = folder / f"{schedule}-{number}"
    command = [sys.executable, "-m", "verbund", "train", "job.toml", "-q", "--run", str(run)]
    command += ["--set", f"strategy.schedule={schedule}"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=DEADLINE)
    ends: dict[int, int] = {}
    for line in (run / "journal" / "worker-1-1.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["t"] == "spans":
            for _, step, begun, length in np.array(record["rows"]).reshape(-1, 4).tolist():
                ends[step] = max(ends.get(step, 0), begun + length)
    taken = (ends[STEPS - 1] - ends[WARM_UP]) / 1e9
    pipeline: dict[str, Any] = json.loads((run / "summary.json").read_text())["pipeline"]
    return (STEPS - 1 - WARM_UP) / taken, pipeline


def peer(folder: Path, schedule: str) -> float:
    (folder / "peer.py").write_text(PEER.replace("{schedule}", PEERS[schedule]))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "peer.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment, timeout=DEADLINE)
    if done.returncode:
        raise SystemExit(f"the peer failed:\n{done.stderr}")
    warm, last = json.loads(done.stdout.splitlines()[-1])
    return (STEPS - 1 - WARM_UP) / float(last - warm)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", default="gpipe,1f1b,interleaved,zero_bubble")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        random = np.random.default_rng(0)
        x = random.normal(size=(512, LENGTH, WIDTH)).astype(np.float32)
        np.savez(folder / "data.npz", x=x, y=random.integers(0, 10, 512))
        (folder / "task.py").write_text(MODEL)
        (folder / "job.toml").write_text(JOB)
        for schedule in arguments.schedules.split(","):
            mine, theirs, bubbles = [], [], []
            for number in range(arguments.rounds):
                speed, pipeline = ours(folder, schedule, number)
                mine.append(speed)
                bubbles.append(pipeline["bubble"])
                if schedule in PEERS:
                    theirs.append(peer(folder, schedule))
            figures: dict[str, Any] = {
                key: round(statistics.median(bubble[key] for bubble in bubbles), 3) for key in ("measured", "theory")
            }
            figures["steps_per_second"] = {"ours": round(statistics.median(mine), 3)}
            if theirs:
                figures["steps_per_second"]["peer"] = round(statistics.median(theirs), 3)
                figures["steps_per_second"]["ratio"] = round(statistics.median(mine) / statistics.median(theirs), 3)
            results[schedule] = figures
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Linux {platform.release()}"
    print(json.dumps({"bench": "pipeline", "stages": 2, "machine": machine, "schedules": results}))


if __name__ == "__main__":
    main()
