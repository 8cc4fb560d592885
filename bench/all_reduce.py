"""All-reduce between the processes of one host: ours through shared memory against gloo's over loopback.

    python bench/all_reduce.py [--workers 2,4] [--sizes 4096,262144,4194304,16777216,67108864] [--seconds 1]

Both sides in turn, in the same processes, on float32; `torch.distributed.all_reduce` with the backend gloo is the peer.
Prints one JSON line: per number of workers and size in bytes the microseconds of the slowest worker (medians), ours on
memory of the group's (`resident`) and on any other (`copied`), the peer's, and how often faster ours are. `copy` is how
long each worker takes to copy as many bytes, all at once; `of_copy` is its share of the time of `resident`: 1 would be
as fast as one copy.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from verbund.comm.collectives import Group

c10d: Any = dist  # its stubs know only some of what it has

LEAST, MOST = 3, 300


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="2,4")
    parser.add_argument("--sizes", default="4096,262144,4194304,16777216,67108864")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each size and side, about")
    arguments = parser.parse_args()
    sizes = [int(size) for size in arguments.sizes.split(",")]
    results = {workers: apart(int(workers), sizes, arguments.seconds) for workers in arguments.workers.split(",")}
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Linux {platform.release()}"
    print(json.dumps({"bench": "all_reduce", "machine": machine, "workers": results}))


def apart(workers: int, sizes: list[int], seconds: float) -> dict[str, Any]:
    """The figures of forked workers."""
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(workers):
            if (pid := os.fork()) == 0:
                status = 1
                try:
                    torch.set_num_threads(1)
                    figures = measure(Path(folder), rank, workers, sizes, seconds)
                    if rank == 0:
                        (Path(folder) / "figures").write_text(json.dumps(figures))
                    status = 0
                finally:
                    os._exit(status)
            children.append(pid)
        statuses = [os.waitpid(pid, 0)[1] for pid in children]
        if any(statuses):
            raise SystemExit("a worker failed")
        figures = json.loads((Path(folder) / "figures").read_text())
        assert isinstance(figures, dict)
        return figures


def measure(folder: Path, rank: int, workers: int, sizes: list[int], seconds: float) -> dict[str, Any]:
    group = Group(folder / "ours", rank, workers, torch.device("cpu"), 60.0)
    if group.note:
        raise SystemExit(group.note)
    store = c10d.FileStore(str(folder / "gloo"), workers)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=workers, timeout=timedelta(seconds=60))
    figures: dict[str, Any] = {}
    for size in sizes:
        count = size // 4
        resident = group.empty(count, torch.float32)
        plain, other = torch.ones(count), torch.ones(count)
        sides: dict[str, Callable[[], Any]] = {
            "resident": lambda tensor=resident: group.all_reduce(tensor, "ours"),  # type: ignore[misc]
            "copied": lambda tensor=plain: group.all_reduce(tensor, "ours"),  # type: ignore[misc]
            "gloo": lambda tensor=plain: dist.all_reduce(tensor),  # type: ignore[misc]
            "copy": lambda to=plain, of=other: to.copy_(of),  # type: ignore[misc]
        }
        times: dict[str, list[float]] = {name: [] for name in sides}
        for turn in range(3):
            for name, run in sides.items():
                for tensor in (resident, plain, other):
                    tensor.fill_(1.0)
                rounds = LEAST
                if turn:  # the first was the warm-up, from which all workers know alike how many are worth the time
                    rounds = max(LEAST, min(MOST, int(seconds / 2 / times[name][0])))
                    rounds = int(slowest(group, [float(rounds)])[0])
                taken = slowest(group, [timed(group, run) for _ in range(rounds)])
                times[name] = taken[-1:] if not turn else times[name] + taken
        medians = {name: statistics.median(taken[1:]) for name, taken in times.items()}
        figures[str(size)] = {
            **{name: round(median * 1e6, 1) for name, median in medians.items()},
            "resident_faster": round(medians["gloo"] / medians["resident"], 2),
            "copied_faster": round(medians["gloo"] / medians["copied"], 2),
            "of_copy": round(medians["copy"] / medians["resident"], 2),
            "copy_gb_per_second": round(size / medians["copy"] / 1e9, 2),
        }
    group.barrier("the end")
    return figures


def timed(group: Group, run: Callable[[], Any]) -> float:
    group.barrier("the start")
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def slowest(group: Group, numbers: list[float]) -> list[float]:
    """The largest of all workers' numbers, place by place."""
    tensor = torch.tensor(numbers, dtype=torch.float64)
    group.all_reduce(tensor, "the times", maximum=True)
    return [float(number) for number in tensor]


if __name__ == "__main__":
    main()
