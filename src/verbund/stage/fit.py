"""Whether a mesh suits a model: every refusal before a worker starts, what each layer costs, and whether it fits into
the memory there is."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from verbund.comm.collectives import Group
from verbund.data.loader import Batch
from verbund.job import AXES, Job
from verbund.mesh import divide, initial
from verbund.mesh.axes import Mesh
from verbund.mesh.pipeline import cut
from verbund.mesh.pipeline.cut import Layers
from verbund.mesh.replica import Replica, call, record
from verbund.mesh.tensor.exchange import Axis
from verbund.randomness import SampleRandomness
from verbund.task import Task

_REPEATS = 3


@dataclass(frozen=True)
class Need:
    """What an undivided worker needs, in bytes.

    Args:
        tensors: parameters, gradients, optimiser states, averages and the copy that a checkpoint is written from.
        rest: activations and what else a dry run took.
    """

    tensors: int
    rest: int

    def of(self, mesh: Mesh, largest_stage: float) -> int:
        """What the worker of a mesh that needs most is expected to need.

        Args:
            mesh: the axes.
            largest_stage: the share of all parameters that the largest pipeline stage has.
        """
        kept = self.tensors * largest_stage / (mesh.shard * mesh.tensor)
        # The whole parameters of a few blocks are there for a moment; of 4 or more copies one is the parameters.
        gathered = self.tensors * largest_stage / (4 * mesh.tensor) / 2 if mesh.shard > 1 else 0.0
        return int(kept + gathered + self.rest / (mesh.tensor * mesh.pipeline))


@dataclass(frozen=True)
class Fit:
    """What was found out about a mesh.

    Args:
        worker_bytes: of the worker that needs most, estimated unless nothing is divided.
        costs: seconds of each layer's forward and backward pass, where there is a pipeline.
        others: meshes of as many workers in which a worker needs less, with what it would need.
        notes: for the user.
    """

    worker_bytes: int
    costs: list[float] | None
    others: dict[str, int]
    notes: list[str]


def examine(replica: Replica, task: Task, job: Job, batch: Batch, need: Need) -> Fit:
    """Tries a mesh on a whole model; the replica is of no use afterwards.

    Args:
        replica: undivided.
        task: its task.
        job: its strategy is tried.
        batch: some samples.
        need: of the undivided model.

    Raises:
        InputError: naming the module that cannot be cut so, and what would work.
    """
    mesh = Mesh.of(job.strategy, 0)
    if not mesh.divides_model:
        return Fit(need.of(mesh, 1.0), None, _others(mesh, need), [])
    model = replica.model
    divide.refuse(job, mesh, model, replica.statistics)
    call_example = divide.example_call(task, batch.columns)
    notes: list[str] = []
    costs: list[float] | None = None
    largest = 1.0
    if mesh.pipeline > 1:
        plan = task.pipeline_plan() if task.pipeline_plan is not None else None
        layers = cut.layers(model, plan, call_example)
        costs = measure(replica, task, layers, batch)
        starts = divide.starts(model, layers, job, mesh, costs)
        largest = _largest_stage(model, layers, starts, mesh)
        notes.append(_stages_note(layers, starts, costs, mesh))
    if mesh.tensor > 1:
        randomness = replica.randomness if isinstance(replica.randomness, SampleRandomness) else None
        whole = divide.whole(model)
        peers = Group.apart(0, mesh.tensor, replica.device)
        divide.cut_operations(model, task, whole, Axis(peers), randomness, call_example)
        notes += divide.uneven(whole)
    return Fit(need.of(mesh, largest), costs, _others(mesh, need), notes)


def can_be_deferred(task: Task, seed: int, notes: list[str]) -> bool:
    """Whether the model can be built without values and filled part by part, so that no worker ever holds it whole."""
    try:
        record(task, seed).fill(lambda *_: None)
    except initial.NotRecordable as error:
        notes.append(f"Every worker builds the whole model before it keeps its part: {error}")
        return False
    return True


def measure(replica: Replica, task: Task, layers: Layers, batch: Batch) -> list[float]:
    """Seconds that each layer's forward and backward pass take, the fastest of some; what is before the first layer
    belongs to it, and what is after the last, the loss too, to the last."""
    model = replica.model
    forward: list[float] = []
    backward: list[tuple[int, float]] = []

    def follow(index: int, module: nn.Module) -> list[Any]:
        def begins(*_: Any) -> None:
            forward.append(time.perf_counter())

        def ends(_module: nn.Module, _args: Any, output: Any) -> None:
            tensors = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
            if tensors:
                tensors[0].register_hook(lambda _: backward.append((index, time.perf_counter())))  # type: ignore[no-untyped-call]

        return [module.register_forward_pre_hook(begins), module.register_forward_hook(ends)]

    handles = [h for index, path in enumerate(layers.paths) for h in follow(index, model.get_submodule(path))]
    columns = {name: value.to(replica.device) for name, value in batch.columns.items()}
    best: list[float] = []
    try:
        model.train()
        for _ in range(_REPEATS):
            forward.clear()
            backward.clear()
            inputs, targets = task.inputs(columns), task.targets(columns)
            start = time.perf_counter()
            with replica.randomness.active(0, torch.from_numpy(batch.ids)):
                total = task.loss(call(model, inputs), targets).total.sum()
            middle = time.perf_counter()
            total.backward()  # type: ignore[no-untyped-call]
            end = time.perf_counter()
            model.zero_grad(set_to_none=True)
            taken = [b - a for a, b in pairwise([start, *forward[1:], middle])]
            arrivals = dict(backward)
            moment = middle
            for index in range(len(taken) - 1, 0, -1):
                # When the gradient of the layer before is there, this one's backward pass is over.
                done = arrivals.get(index - 1, moment)
                taken[index] += max(done - moment, 0.0)
                moment = max(done, moment)
            taken[0] += end - moment
            best = [min(pair) for pair in zip(best, taken, strict=True)] if best else taken
    finally:
        for handle in handles:
            handle.remove()
    return best


def _largest_stage(model: nn.Module, layers: Layers, starts: Sequence[int], mesh: Mesh) -> float:
    workers = [0] * mesh.pipeline
    total = 0
    for name, parameter in model.named_parameters():
        total += parameter.nbytes
        for worker in {stage % mesh.pipeline for stage in layers.stages_of(name, starts)}:
            workers[worker] += parameter.nbytes
    return max(workers) / max(total, 1)


def _stages_note(layers: Layers, starts: Sequence[int], costs: list[float], mesh: Mesh) -> str:
    ends = [*starts[1:], len(layers.paths)]
    parts = [
        f"{stage}: `{layers.paths[low]}`{f' to `{layers.paths[high - 1]}`' if high - low > 1 else ''}"
        for stage, (low, high) in enumerate(zip(starts, ends, strict=True))
    ]
    times = [sum(costs[low:high]) for low, high in zip(starts, ends, strict=True)]
    even = sum(times) / len(times) / max(max(times), 1e-12)
    return f"Pipeline stages {', '.join(parts)}; the busiest has {1 / max(even, 1e-12):.2f} times the mean work"


def _others(mesh: Mesh, need: Need) -> dict[str, int]:
    world = mesh.size(*AXES)
    found = {}
    for axis in AXES[1:]:
        other = Mesh(**{axis: world}, islands=mesh.islands)
        if world > 1 and other != mesh:
            found[f"{axis}={world}"] = need.of(other, 1.0 / world if axis == "pipeline" else 1.0)
    return found


def need_of(replica: Replica, peak: int, workers: int) -> Need:
    """What a replica that has taken a step needs.

    Args:
        replica: undivided.
        peak: bytes by which the process has grown.
        workers: how many there will be.
    """
    model = replica.model
    states = [v for state in replica.optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    averages = [v for _, v in replica.ema.named_tensors()] if replica.ema is not None else []
    saved = sum(t.nbytes for t in [*model.parameters(), *model.buffers(), *states, *averages])
    gradients = sum(p.nbytes for p in replica.parameters)
    # Besides: the copy that a checkpoint is written from, the buckets of the all-reduce, and of a compression what was
    # not sent yet, its copy, and messages.
    copies = 1 + (workers > 1) + (3 if workers > 1 and replica.strategy.compression.name != "none" else 0)
    return Need(2 * saved + gradients * copies, max(peak - saved - gradients, 0))
