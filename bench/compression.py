"""Compressed gradients: what each method costs, against torch's own hooks; and what accuracy it reaches.

    python bench/compression.py [--sizes 1,20] [--rounds 15]
    python bench/compression.py --accuracy [--mnist FILE.parquet] [--seeds 3]

The first adds up the gradients of models of 1 and 20 million parameters over 2 processes on gloo: backward pass, and
sums in place. Both sides are in the same processes and take turns: Verbund's `GradientSums`, and
DistributedDataParallel, with `fp16_compress_hook` and `powerSGD_hook`. Prints one JSON line: per size and method
milliseconds a step (medians), ours and the peer's; what of ours is computing for compression; and how many times fewer
bytes are sent. The second trains networks on scikit-learn's digits, and on MNIST if its file is given, with every
method at its defaults, and prints the validation accuracy (means over the seeds) beside that without compression.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from verbund.cluster.local import LocalCluster
from verbund.cluster.process import Cluster
from verbund.comm.collectives import Group
from verbund.job import Compression, Job
from verbund.mesh.axes import Mesh
from verbund.mesh.compression import GradientCompression
from verbund.mesh.data import GradientSums
from verbund.mesh.held import Held

WORKERS = 2
METHODS = ("none", "fp16", "bf16", "int8", "int4", "sign", "top_k", "power_sgd")
RANK = Compression().rank
SHAPES = {1: (512, 4), 20: (1024, 19)}
"""Millions of parameters: width and number of the square matrices, each with a vector."""
SKIPPED = 4


class Sum(nn.Module):
    """Parameters whose gradients cost next to nothing to compute."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        shapes = [(width, width), (width,)] * count
        self.parts = nn.ParameterList([torch.randn(shape) for shape in shapes])

    def forward(self, factors: list[Tensor]) -> Tensor:
        return torch.stack([(p * f).sum() for p, f in zip(self.parts, factors, strict=True)]).sum()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=",".join(map(str, SHAPES)))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--accuracy", action="store_true")
    parser.add_argument("--mnist", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(int(arguments.worker[0]), Path(arguments.worker[1]), arguments.sizes, arguments.rounds)
        return
    found = accuracy(arguments.mnist, arguments.seeds) if arguments.accuracy else speed(arguments)
    bench = "compression_accuracy" if arguments.accuracy else "compression"
    print(json.dumps({"bench": bench, "workers": WORKERS, "machine": machine(), **found}))


# -- speed -----------------------------------------------------------------------------------------------------


def speed(arguments: argparse.Namespace) -> dict[str, Any]:
    """Starts the workers; the first one's figures."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--sizes", arguments.sizes, "--rounds", str(arguments.rounds), "--worker"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        workers = [
            subprocess.Popen([*command, str(rank), folder], env=environment, stdout=subprocess.PIPE, text=True)
            for rank in range(WORKERS)
        ]
        printed = [worker.communicate(timeout=900)[0] for worker in workers]
        if any(worker.returncode for worker in workers):
            raise SystemExit("a worker failed")
        sizes: dict[str, Any] = json.loads(printed[0])
        return {"sizes": sizes}


def work(rank: int, folder: Path, sizes: str, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/peer", rank=rank, world_size=WORKERS)
    group = Group(folder / "ours", rank, WORKERS, torch.device("cpu"), 300.0)
    found = {f"{size}M": figures(size, group, rounds) for size in map(int, sizes.split(","))}
    if rank == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    os._exit(0)  # without taking down gloo's threads, which may still be in the hooks' callbacks


def figures(size: int, group: Group, rounds: int) -> dict[str, Any]:
    """All methods of both sides in turn, one step each a round."""
    ours = {name: Ours(name, size, group) for name in METHODS}
    peers = {name: peer(name, size) for name in ("none", "fp16", "power_sgd")}
    times: dict[tuple[str, str], list[float]] = {}
    for number in range(rounds + SKIPPED):
        for side, steps in (("ours", ours), ("peer", peers)):
            for name, step in steps.items():
                dist.barrier()
                start = time.perf_counter()
                step(number)
                if number >= SKIPPED:
                    times.setdefault((side, name), []).append(1000 * (time.perf_counter() - start))
    table = {}
    for name in METHODS:
        mine, (ratio, computing) = statistics.median(times["ours", name]), ours[name].reached(rounds + SKIPPED)
        row = {"ours_ms": round(mine, 2), "computing_ms": round(computing, 2), "bytes_ratio": round(ratio, 2)}
        if ("peer", name) in times:
            theirs = statistics.median(times["peer", name])
            row |= {"peer_ms": round(theirs, 2), "ratio": round(mine / theirs, 3)}
        table[name] = row
    return table


class Ours:
    """A model whose gradients `GradientSums` adds up."""

    def __init__(self, method: str, size: int, group: Group) -> None:
        torch.manual_seed(0)
        self.model, self.factors = Sum(*SHAPES[size]), factors(size, group.rank)
        held = [Held(name, tuple(p.shape), p, p) for name, p in self.model.named_parameters()]
        mesh = Mesh(group.rank, data=group.world)
        self.compression = (
            GradientCompression(Compression.model_validate({"name": method, "warmup": 0}), held, mesh, 0)
            if method != "none"
            else None
        )
        self.sums = GradientSums(list(self.model.parameters()), group, compression=self.compression)

    def __call__(self, step: int) -> None:
        self.sums.begin(step)
        self.sums.overlap()
        self.model(self.factors).backward()
        self.sums.finish(0.0, 1.0, 0.0)

    def reached(self, steps: int) -> tuple[float, float]:
        """How many times fewer bytes were sent, and milliseconds a step of computing for it."""
        if self.compression is None:
            return 1.0, 0.0
        totals = self.compression.totals()
        return totals["bytes_without"] / totals["bytes_with"], 1000 * totals["seconds"] / steps


def peer(method: str, size: int) -> Callable[[int], None]:
    """A step of DistributedDataParallel with torch's hook."""
    torch.manual_seed(0)
    # Of several buckets the hook for PowerSGD sends collectives from callbacks, on gloo in another order on each rank.
    dist._DEFAULT_FIRST_BUCKET_BYTES = 1 << 40 if method == "power_sgd" else 1 << 20  # type: ignore[attr-defined]
    bucket = 1 << 20 if method == "power_sgd" else None
    model = DistributedDataParallel(Sum(*SHAPES[size]), gradient_as_bucket_view=True, bucket_cap_mb=bucket)
    if method == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif method == "power_sgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=RANK, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    values = factors(size, dist.get_rank())

    def step(_: int) -> None:
        model.zero_grad(set_to_none=True)
        model(values).backward()

    return step


def factors(size: int, rank: int) -> list[Tensor]:
    """The gradients."""
    generator = torch.Generator().manual_seed(rank)
    width, count = SHAPES[size]
    return [torch.randn(shape, generator=generator) for shape in [(width, width), (width,)] * count]


# -- accuracy --------------------------------------------------------------------------------------------------

CONVNET = """
from torch import nn

def model():
    return nn.Sequential(
        nn.Flatten(), nn.Unflatten(1, (1, {side}, {side})), nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(32 * ({side} // 4) ** 2, 64), nn.ReLU(), nn.Linear(64, 10),
    )
"""


def accuracy(mnist: Path | None, seeds: int) -> dict[str, Any]:
    """Every method's validation accuracy, in points, and the difference from that without compression."""
    from verbund.stage import before

    warm = LocalCluster(preload=["verbund.stage.preload"])

    @contextmanager
    def cluster(job: Job) -> Iterator[Cluster]:
        yield warm

    before.cluster_of = cluster
    sources = {"digits": ("sklearn:digits", 8, 16.0, 15)}
    if mnist is not None:
        sources["mnist"] = (str(mnist.resolve()), 28, 255.0, 6)
    try:
        return {name: {"points": trained(*source, seeds), "seeds": seeds} for name, source in sources.items()}
    finally:
        warm.close()


def trained(data: str, side: int, scale: float, epochs: int, seeds: int) -> dict[str, Any]:
    from verbund.stage import launch

    reached: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "task.py").write_text(CONVNET.format(side=side))
        for seed in range(seeds):
            for method in METHODS:
                raw: dict[str, Any] = {
                    "task": "task.py",
                    "seed": seed,
                    "data": {"train": data, "validation_fraction": 0.2, "input": "image", "target": "label"},
                    "train": {"objective": "cross_entropy", "global_batch": 64, "epochs": epochs},
                    "validate": {"every": "end", "metrics": ["accuracy"]},
                    "checkpoint": {"every": "end"},
                    "strategy": {"mesh": {"data": WORKERS}, "compression": method},
                }
                raw["data"]["scale"] = {"image": scale}
                raw["data"]["cache"] = str(Path(folder) / "cache")
                raw["train"]["optimizer"] = {"name": "adamw", "lr": 3e-3}
                raw["train"]["schedule"] = {"name": "cosine", "warmup": 20}
                job = Job.build(raw, {}, source="bench", folder=Path(folder))
                run = launch.train(job, Path(folder) / f"run-{method}-{seed}")
                value = 100 * run.summary["metrics"]["accuracy"]["last"]
                reached.setdefault(method, []).append(value)
                print(data, seed, method, f"{value:.2f}", file=sys.stderr, flush=True)
    means = {method: statistics.mean(values) for method, values in reached.items()}
    return {
        method: {"accuracy": round(mean, 2), "difference": round(mean - means["none"], 2)}
        for method, mean in means.items()
    }


def machine() -> str:
    return f"{os.cpu_count()} cores, {platform.machine()}, Linux {platform.release()}"


if __name__ == "__main__":
    main()
