"""The peer of `goodput.py`: DistributedDataParallel under torchrun, which restarts all workers from a checkpoint.

The network, the optimiser and the global batch are those of `goodput.py`. In the peer's favour
its workers are held to their share of a core only once torch is imported. The first one saves all that a restart needs
every so many seconds, and has a log with a line for each step that was done.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

SCRIPT = """
import os, sys, time
from pathlib import Path
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

folder, prefix, period, quota, batch, pause = Path(sys.argv[1]), *sys.argv[2:5], int(sys.argv[5]), float(sys.argv[6])
group = Path(f"{prefix}-{os.getpid()}")
group.mkdir(exist_ok=True)
(group / "cpu.cfs_period_us").write_text(period)
(group / "cpu.cfs_quota_us").write_text(quota)
(group / "cgroup.procs").write_text(str(os.getpid()))
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
data = np.load(folder / "data.npz")
x, y = torch.from_numpy(data["x"]), torch.from_numpy(data["y"])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
step, saved = 0, folder / "saved.pt"
known = torch.load(saved) if saved.exists() else None
if known is not None:
    model.load_state_dict(known["model"])
replica = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
if known is not None:
    optimizer.load_state_dict(known["optimizer"])
    step = known["step"]
log = os.open(folder / "steps", os.O_WRONLY | os.O_CREAT | os.O_APPEND) if rank == 0 else None
due = time.monotonic() + pause
per_epoch = len(x) // batch
while True:
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(step // per_epoch))
    while True:
        low = step % per_epoch * batch
        mine = order[low : low + batch].tensor_split(world)[rank]
        loss = nn.functional.cross_entropy(replica(x[mine]), y[mine])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if log is not None:
            os.write(log, f"{step} {time.monotonic_ns()}\\n".encode())
        step += 1
        if log is not None and time.monotonic() > due:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, folder / "saving.pt")
            os.replace(folder / "saving.pt", saved)
            due = time.monotonic() + pause
        if step % per_epoch == 0:
            break
"""


def start(folder: Path, prefix: Path, period: int, quota: int, batch: int, workers: int, pause: float) -> Any:
    """The command, which is the parent of its workers; `pause` seconds lie between two saves."""
    (folder / "peer.py").write_text(SCRIPT)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
    words += ["--max-restarts=1000000", "--monitor-interval=0.1", str(folder / "peer.py"), str(folder), str(prefix)]
    words += [str(period), str(quota), str(batch), str(pause)]
    return subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def steps(folder: Path) -> tuple[np.ndarray[Any, Any], int]:
    """When each step was done for the last time, in seconds of the monotonic clock, and how many were done again."""
    path = folder / "steps"
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    last = {int(step): int(at) for step, at in lines}
    return np.array([last[step] for step in sorted(last)]) / 1e9, len(lines) - len(last)
