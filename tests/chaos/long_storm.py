"""Many runs with parameter servers under many seeds, longer than a test may take.

From the folder `tests`: `python -m chaos.long_storm 100 140` takes these seeds; each decides on strategy, rests and
strikes. What fails is kept below /tmp and named; the exit status is 1 then.
"""

from __future__ import annotations

import sys
import tempfile
import time
import traceback
from contextlib import contextmanager
from pathlib import Path
from random import Random

import numpy as np

from chaos.striking import Striker, storm
from chaos.test_served_runs import CHANGES, COUNTER, MODES, STEPS, counted
from processes import gone
from verbund.cluster.local import LocalCluster
from verbund.job import Job, parse_strategy
from verbund.stage import before, launch


def job_of(seed: int, folder: Path) -> Job:
    """The job that a seed stands for."""
    random = Random(f"job {seed}")
    (folder / "task.py").write_text(COUNTER)
    x = np.random.default_rng(7).normal(size=(203, 12)).astype(np.float32)
    np.savez(folder / "data.npz", x=x, y=np.zeros(203, np.int64))
    islands, servers = random.choice([(2, 2), (2, 1), (3, 3), (2, 3), (1, 2)])
    data = random.choice([1, 1, 2])
    mode = random.choice(MODES)
    strategy = (
        f"islands={islands},data={data},exchange=parameter_server,exchange.servers={servers},"
        f"exchange.consistency={mode},exchange.block_bytes=1024"
    )
    changes = {**CHANGES, **parse_strategy(strategy), "checkpoint.every": random.choice([5, 17, "end"])}
    raw = {
        "task": "task.py",
        "data": {"train": "data.npz", "input": "x", "target": "y", "cache": str(folder / "cache")},
        "train": {"objective": "cross_entropy", "global_batch": 37},
        "validate": {"every": "end"},
        "checkpoint": {"every": "end"},
    }
    return Job.build(raw, changes, source="job.toml", folder=folder)


def struck(job: Job, seed: int) -> list[str]:
    """Who may be lost: with replicas all servers but one, as those that are left must have everything."""
    servers = job.strategy.exchange.servers
    spared = Random(f"spared {seed}").randrange(servers) if servers > 1 else None
    # Of three servers with one replica each only one may be lost at once.
    among = [rank for rank in range(servers) if rank != spared][:1]
    return [
        *(f"worker {rank}" for rank in range(job.world)),
        *(f"server {rank}" for rank in among),
        "coordinator 0",
    ]


def run(seed: int, folder: Path) -> str:
    """Trains a seed's job under its strikes; in words what was done."""
    job = job_of(seed, folder)
    count = job.world + job.strategy.exchange.servers + 1
    strikes = storm(seed, struck(job, seed), Random(seed).randrange(1, 6), (0.0, 1.6))
    # Of every third run the strikes begin while its processes are still starting.
    striker = Striker(folder / "run", count if seed % 3 else 2, strikes)
    striker.start()
    exchange = job.strategy.exchange
    words = (
        f"{job.strategy.islands} islands of {job.world // job.strategy.islands}, {exchange.servers} servers, "
        f"{exchange.consistency}, checkpoint.every = {job.checkpoint.every}"
    )
    print(f"seed {seed}: {words}", flush=True)  # noqa: T201
    try:
        trained = launch.train(job, folder / "run")
    finally:
        striker.end()
        for one in striker.struck:
            print(f"    {one.at} {one.name} {one.signal.name}", flush=True)  # noqa: T201
    if not gone(list(striker.seen), 10):
        raise AssertionError("processes are left")
    counted(trained, STEPS)
    return words


def main() -> int:
    """Runs the seeds of the command line; how many have failed."""
    first, last = int(sys.argv[1]), int(sys.argv[2])
    cluster = LocalCluster(preload=["verbund.stage.preload_divided"])

    @contextmanager
    def warm(_: Job):  # type: ignore[no-untyped-def]
        yield cluster

    before.cluster_of = warm  # type: ignore[assignment]
    failed = []
    for seed in range(first, last):
        folder = Path(tempfile.mkdtemp(prefix=f"storm-{seed}-"))
        began = time.monotonic()
        try:
            run(seed, folder)
            print(f"  held, {time.monotonic() - began:.1f} s", flush=True)  # noqa: T201
        except Exception:
            failed.append(seed)
            traceback.print_exc()
            print(f"  FAILED: {folder}", flush=True)  # noqa: T201
    cluster.close()
    print(f"failed: {failed}")  # noqa: T201
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
