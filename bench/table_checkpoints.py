"""What a checkpoint of an embedding table takes on disk where few of its rows were used, beside the whole tensors.

    python bench/table_checkpoints.py [--rows 8589934592] [--width 8] [--used 185]

Two islands and one parameter server train a table of `--rows` rows of `--width` float32 by Adagrad, on samples that
name `--used` of them. One JSON line: bytes of the checkpoint's folder, bytes that values and moments of all rows
would take, and their ratio; and the seconds of the whole run, with its beginning and end.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from pathlib import Path

import numpy as np

from verbund.job import Job
from verbund.stage import launch

TASK = """
from torch import nn
from verbund import Table

class Scores(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = Table({rows}, {width}, seed=1)
        self.out = nn.Linear({width}, 2)

    def forward(self, item):
        return self.out(self.items(item))

def model():
    return Scores()

def inputs(batch):
    return batch["item"].long()

def rows(batch):
    return {{"items": batch["item"].long()}}
"""
JOB = """
task = "task.py"
[data]
train = "data.npz"
input = "item"
target = "y"
cache = "cache"
[train]
objective = "cross_entropy"
global_batch = 64
epochs = 1
optimizer = { name = "adagrad", lr = 0.1 }
[checkpoint]
every = "end"
[strategy]
islands = 2
exchange = { name = "parameter_server", servers = 1 }
"""


def main() -> None:
    """Measures, and prints the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2**33)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--used", type=int, default=185)
    given = parser.parse_args()
    generator = np.random.default_rng(1)
    items = generator.choice(given.rows, given.used, replace=False)[generator.integers(0, given.used, 1024)]
    with tempfile.TemporaryDirectory(prefix="verbund-bench-") as name:
        folder = Path(name)
        np.savez(folder / "data.npz", item=items.astype(np.int64), y=(items % 2).astype(np.int64))
        (folder / "task.py").write_text(TASK.format(rows=given.rows, width=given.width))
        (folder / "job.toml").write_text(JOB)
        start = time.monotonic()
        run = launch.train(Job.read(folder / "job.toml"), folder / "run", quiet=True)
        seconds = time.monotonic() - start
        newest = max(run.checkpoints.glob("step-*"))
        size = sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())
    whole = given.rows * given.width * 4 * 2
    result = {
        "bench": "table_checkpoints",
        "used": len(np.unique(items)),
        "bytes": size,
        "whole": whole,
        "ratio": size / whole,
        "seconds": round(seconds, 2),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
