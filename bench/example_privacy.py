"""DP-SGD's local step against Opacus: the same clipped sum, and the CPU seconds of a step; the model is McMahan's 2NN.

    pip install --no-deps --target DIR opacus opt-einsum
    python bench/example_privacy.py --data mnist-10k.parquet --opacus DIR [--batch 240] [--steps 20]

Both compute, in one thread, the gradients of the very same batches of real digits, clip them sample by sample and take
the sum, with noise; a step without privacy stands beside. First the sums without noise are compared.

Prints a line each and one JSON line.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn

from verbund import task as tasks
from verbund.data.batch import Batch
from verbund.exchange.federated.privacy import ExamplePrivacy
from verbund.job import Job, Privacy
from verbund.mesh.axes import Mesh
from verbund.mesh.groups import Groups
from verbund.mesh.replica import Replica
from verbund.stage.federated.example_steps import ExampleSteps

TASK = """
from torch import nn

def model():
    return nn.Sequential(nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10))
"""
CLIP, NOISE = 1.0, 1.1


def digits(path: Path) -> tuple[Tensor, Tensor]:
    """Images [n, 784] from 0 to 1, and labels [n]."""
    table = pq.read_table(path)
    images = np.stack(table["image"].to_numpy()).astype(np.float32) / 255.0
    return torch.from_numpy(images), torch.from_numpy(table["label"].to_numpy().astype(np.int64))


def ours(folder: Path, batch: int) -> tuple[ExampleSteps, Replica]:
    """What computes a client's local steps."""
    (folder / "task.py").write_text(TASK)
    raw = {
        "task": "task.py",
        "data": {"train": "none.npz", "input": "x", "target": "y"},
        "train": {"objective": "cross_entropy", "steps": 1, "global_batch": batch, "optimizer": "sgd"},
        "strategy": {"exchange": {"name": "federated", "clients": 1, "privacy": {"kind": "examples", "clip": CLIP}}},
    }
    job = Job.build(raw, {}, source="bench", folder=folder)
    replica = Replica(tasks.load(job, ["x", "y"]), job, Mesh(), Groups.alone(torch.device("cpu")))
    return ExampleSteps(replica, job), replica


def seconds(step: Callable[[int], Any], steps: int) -> float:
    """CPU seconds of a step, the median; the first two are not counted."""
    taken = []
    for number in range(steps + 2):
        begun = time.process_time()
        step(number)
        taken.append(time.process_time() - begun)
    return float(np.median(taken[2:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--opacus", required=True, help="The folder that Opacus was installed in.")
    parser.add_argument("--batch", type=int, default=240)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    sys.path.append(arguments.opacus)
    warnings.filterwarnings("ignore", "Full backward hook")
    opacus = importlib.import_module("opacus")
    optimizers = importlib.import_module("opacus.optimizers")

    torch.set_num_threads(1)
    images, labels = digits(arguments.data)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    batches = [part.numpy() for part in torch.split(order.repeat(2), arguments.batch)][: arguments.steps + 2]
    with tempfile.TemporaryDirectory() as place:
        examples, replica = ours(Path(place), arguments.batch)

        def read(ids: np.ndarray[Any, Any], number: int) -> Batch:
            return Batch(number, ids, {"x": images[ids], "y": labels[ids]})

        def privacy(noise: float) -> ExamplePrivacy:
            settings = Privacy(kind="examples", clip=CLIP, noise=noise)
            return ExamplePrivacy(settings, len(images), arguments.batch / len(images), "bench")

        why = examples.try_out(read(batches[0][:3], 0))
        assert why is None, why
        peer = nn.Sequential(nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10))
        peer.load_state_dict(replica.model.state_dict())
        module = opacus.GradSampleModule(peer)
        sgd = torch.optim.SGD(module.parameters(), lr=1e-9)  # nothing moves: all steps are of one model

        def optimiser(noise: float) -> Any:
            return optimizers.DPOptimizer(
                sgd, noise_multiplier=noise, max_grad_norm=CLIP, expected_batch_size=arguments.batch
            )

        def theirs(number: int, optimizer: Any) -> None:
            optimizer.zero_grad()
            ids = batches[number]
            torch.autograd.backward(nn.functional.cross_entropy(module(images[ids]), labels[ids]))
            optimizer.step()

        theirs(0, optimiser(0.0))
        expected = [p.grad.clone() for p in peer.parameters() if p.grad is not None]
        examples.step(batches[0], 0, read, privacy(1e-12))
        found = [p.grad for p in replica.model.parameters() if p.grad is not None]
        far = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True))
        noisy, dp = privacy(NOISE), optimiser(NOISE)

        def plain(number: int) -> None:
            replica.model.zero_grad()
            ids = batches[number]
            torch.autograd.backward(nn.functional.cross_entropy(replica.model(images[ids]), labels[ids]))

        told = {
            "ours": seconds(lambda number: examples.step(batches[number], number, read, noisy), arguments.steps),
            "opacus": seconds(lambda number: theirs(number, dp), arguments.steps),
            "plain": seconds(plain, arguments.steps),
        }
    print(f"largest difference of the clipped sums, relative: {far:.1e}")
    for name, each in told.items():
        print(f"{name}: {1e3 * each:.1f} ms of CPU a step of {arguments.batch} samples")
    print(json.dumps({"difference": far, **told, "batch": arguments.batch}))


if __name__ == "__main__":
    main()
