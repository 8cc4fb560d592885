"""Training from a large Parquet file without reading it into memory: time to the first step, and memory.

    python bench/loader.py --data flights-3m.parquet [--columns distance,delay]

The first column is the input, the second the target. Runs `verbund train` twice, with an empty cache and with the
converted data in it. The peer does what a plain script does: read the file with pyarrow, make tensors, start two
processes, train. Prints one JSON line: seconds from the command to the end of the first step, and each worker's peak
memory over that of an interpreter with torch.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TASK = """
from torch import nn

def model():
    return nn.Sequential(nn.Linear(1, 64), nn.ReLU(), nn.Linear(64, 1))
"""

JOB = """
task = "task.py"
[data]
train = "{data}"
input = "{input}"
target = "{target}"
scale = {{ {input} = 1000.0 }}
cache = "cache"
[train]
objective = "mean_squared_error"
global_batch = 4096
steps = 200
optimizer = {{ name = "adamw", lr = 1e-3 }}
[checkpoint]
every = "end"
[strategy]
mesh = {{ data = 2 }}
"""

PEER = """
import sys, time
import numpy as np
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    table = pq.read_table(sys.argv[1], columns=[{input!r}, {target!r}])
    x = torch.from_numpy(table[{input!r}].to_numpy().astype(np.float32))[:, None] / 1000.0
    y = torch.from_numpy(table[{target!r}].to_numpy().astype(np.float32))[:, None]
    model = DistributedDataParallel(nn.Sequential(nn.Linear(1, 64), nn.ReLU(), nn.Linear(64, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    ids = order[dist.get_rank() * 2048 : (dist.get_rank() + 1) * 2048]
    loss = nn.functional.mse_loss(model(x[ids]), y[ids])
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
        print(time.monotonic_ns(), peak * 1024)
    dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--columns", default="distance,delay")
    arguments = parser.parse_args()
    source, target = arguments.columns.split(",")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "task.py").write_text(TASK)
        (folder / "job.toml").write_text(JOB.format(data=arguments.data.resolve(), input=source, target=target))
        (folder / "peer.py").write_text(PEER.format(input=source, target=target))
        base = torch_alone()
        cold, warm = ours(folder, "cold", base), ours(folder, "warm", base)
        other = peer(folder, arguments.data.resolve(), base)
    ratio = round(cold["seconds_to_first_step"] / other["seconds_to_first_step"], 3)
    machine = f"{os.cpu_count()} cores, {platform.machine()}"
    print(
        json.dumps(
            {"bench": "loader", "machine": machine, "cold": cold, "warm": warm, "peer": other, "ratio_cold": ratio}
        )
    )


def torch_alone() -> int:
    """Peak bytes of an interpreter that has imported torch."""
    code = (
        "import torch; "
        "print(next(int(l.split()[1]) for l in open('/proc/self/status') if l.startswith('VmHWM')) * 1024)"
    )
    return int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


def ours(folder: Path, name: str, base: int) -> dict[str, Any]:
    start = time.monotonic_ns()
    command = [sys.executable, "-m", "verbund", "train", "job.toml", "--quiet", "--json", "--run", name]
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    summary = json.loads(done.stdout)
    first = 0
    for line in (folder / name / "journal" / "worker-0-1.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["t"] == "spans" and not first:
            rows = [record["rows"][i : i + 4] for i in range(0, len(record["rows"]), 4)]
            first = max(begun + length for kind, step, begun, length in rows if kind == 0 and step == 0)
    peaks = [peak - base for peak in summary["peak_memory_bytes"].values()]
    return {
        "seconds_to_first_step": round((first - start) / 1e9, 2),
        "worker_mb_over_torch": round(max(peaks) / 1e6),
        "samples_per_second": summary["samples_per_second"],
    }


def peer(folder: Path, data: Path, base: int) -> dict[str, Any]:
    start = time.monotonic_ns()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "peer.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(data)], cwd=folder, check=True, capture_output=True, text=True, env=environment
    )
    first, peak = map(int, done.stdout.split()[-2:])
    return {
        "seconds_to_first_step": round((first - start) / 1e9, 2),
        "worker_mb_over_torch": round((peak - base) / 1e6),
    }


if __name__ == "__main__":
    main()
