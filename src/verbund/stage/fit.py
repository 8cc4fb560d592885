"""Whether a mesh suits a model: every refusal before a worker starts, what each layer costs, and whether it fits into
the memory there is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from verbund.comm.collectives import Group
from verbund.data.loader import Batch
from verbund.job import AXES, Job
from verbund.mesh import divide, initial, optimizer
from verbund.mesh.axes import Mesh
from verbund.mesh.initial.of_task import record_task
from verbund.mesh.pipeline import cut
from verbund.mesh.pipeline.cut import Layers
from verbund.mesh.replica import Replica
from verbund.mesh.shard import blocks
from verbund.mesh.tensor.exchange import Axis
from verbund.randomness import SampleRandomness
from verbund.stage.refill import mirrors_kept
from verbund.stage.unbuilt import with_loss
from verbund.task import Task

# Numbers of workers that are worth naming.
_WORLDS = (2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Need:
    """What an undivided worker needs, in bytes.

    Args:
        tensors: parameters, gradients, optimiser states, averages and the copy that a checkpoint is written from.
        buckets: of gradients, which replicas add up in them.
        gathered: what the axis `shard` has whole for a moment.
        rest: activations and what else a dry run took.
        mirror: one mirror of all that is trained.
    """

    tensors: int
    buckets: int
    gathered: int
    rest: int
    mirror: int

    def of(self, mesh: Mesh, largest_stage: float, job: Job) -> int:
        """What the worker of a mesh that needs most is expected to need.

        Args:
            mesh: the axes.
            largest_stage: the share of all parameters that the largest pipeline stage has.
            job: of whose settings it depends whether there are mirrors.
        """
        joint = mesh.data * mesh.islands > 1
        whole = self.tensors + (self.buckets if joint else 0) + mirrors_kept(job, mesh) * self.mirror
        kept = whole * largest_stage / (mesh.shard * mesh.tensor)
        gathered = self.gathered * largest_stage / mesh.tensor if mesh.shard > 1 else 0.0
        return int(kept + gathered + self.rest / (mesh.tensor * mesh.pipeline))


@dataclass(frozen=True)
class Fit:
    """What was found out about a mesh.

    Args:
        worker_bytes: of the worker that needs most, estimated unless nothing is divided.
        costs: of each layer, in no unit, where there is a pipeline.
        others: other meshes, what a worker would need, and how many there would be.
        notes: for the user.
    """

    worker_bytes: int
    costs: list[float] | None
    others: list[tuple[str, int, int]]
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
        return Fit(need.of(mesh, 1.0, job), None, _others(mesh, need, job), [])
    model = replica.model
    divide.refuse(job, mesh, model, replica.statistics)
    call_example = divide.example_call(task, batch.columns)
    notes: list[str] = []
    costs: list[float] | None = None
    largest = 1.0
    if mesh.pipeline > 1:
        plan = task.pipeline_plan() if task.pipeline_plan is not None else None
        layers = cut.layers(model, plan, with_loss(call_example, task, batch))
        costs = layers.work
        sizes = {name: p.numel() for name, p in model.named_parameters()}
        starts = divide.starts(layers, job, mesh, sizes, costs)
        largest = _largest_stage(model, layers, starts, mesh)
        notes.append(_stages_note(layers, starts, costs, mesh))
    if mesh.tensor > 1:
        randomness = replica.randomness if isinstance(replica.randomness, SampleRandomness) else None
        whole = divide.whole(model)
        peers = Group.apart(0, mesh.tensor, replica.device)
        divide.cut_operations(model, task, whole, Axis(peers), randomness, call_example)
        notes += divide.uneven(whole)
    return Fit(need.of(mesh, largest, job), costs, _others(mesh, need, job), notes)


def unbuilt(task: Task, seed: int, notes: list[str]) -> nn.Module | None:
    """The model without its parameters' values, if it can be built so: then each worker can fill its own part, and none
    ever holds it whole."""
    try:
        recorded = record_task(task, seed)
        buffers = {name for name, _ in recorded.model.named_buffers()}
        recorded.fill(lambda name, values: values if name in buffers else None)
    except initial.NotRecordable as error:
        notes.append(f"Every worker builds the whole model before it keeps its part: {error}")
        return None
    return recorded.model


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


def _others(mesh: Mesh, need: Need, job: Job) -> list[tuple[str, int, int]]:
    """One axis alone: with as many workers in an island, and with more."""
    found = []
    mine = mesh.size(*AXES)
    for world in dict.fromkeys((mine, *_WORLDS)):
        if world < max(mine, 2):
            continue
        for axis in AXES[1:]:
            other = Mesh(**{axis: world}, islands=mesh.islands)
            if other != mesh:
                size = need.of(other, 1.0 / world if axis == "pipeline" else 1.0, job)
                found.append((f"{axis}={world}", size, other.world))
    return found


def need_of(replica: Replica, job: Job, peak: int) -> Need:
    """What a replica that has taken a step needs.

    Args:
        replica: undivided.
        job: its strategy.
        peak: bytes by which the process has grown.
    """
    model = replica.model
    states = [v for state in replica.optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    averages = [v for _, v in replica.ema.named_tensors()] if replica.ema is not None else []
    saved = sum(t.nbytes for t in [*model.parameters(), *model.buffers(), *states, *averages])
    gradients = sum(p.nbytes for p in replica.parameters)
    # Besides: the copy that a checkpoint is written from.
    rest = max(peak - saved - gradients, 0)
    return Need(2 * saved + gradients, gradients * _copies(job), _gathered(model, job), rest, saved)


def estimated_need(replica: Replica, job: Job, activations: int = 0) -> Need:
    """What a replica would need whose model has no values.

    Args:
        replica: undivided.
        job: its optimiser and strategy.
        activations: bytes of what a forward pass keeps for the backward pass.
    """
    gradients = sum(p.nbytes for p in replica.parameters)
    states = int(gradients * optimizer.state_share(job.train.optimizer))
    averages = gradients if replica.ema is not None else 0
    saved = sum(t.nbytes for t in [*replica.model.parameters(), *replica.model.buffers()]) + states + averages
    return Need(2 * saved + gradients, gradients * _copies(job), _gathered(replica.model, job), activations, saved)


def _copies(job: Job) -> int:
    """What adding up gradients, or exchanging parameters, takes of memory, in copies of what is trained: the buckets;
    of a compression what was not sent yet, its copy, and messages; of an exchange the common values, their copy to be
    saved, the differences and the moments."""
    strategy = job.strategy
    compressed = (strategy.exchange if strategy.exchange.served else strategy).compression.name != "none"
    return 1 + 3 * compressed + 4 * strategy.exchange.local


def dry_run_bytes(model: nn.Module, job: Job) -> int:
    """What the dry run of a model would take at least: its tensors, gradients, the optimiser's states, averages."""
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    copies = 1 + optimizer.state_share(job.train.optimizer) + (job.train.ema is not None)
    return int(sum(t.nbytes for t in [*model.parameters(), *model.buffers()]) + trained * copies)


def _gathered(model: nn.Module, job: Job) -> int:
    """The whole parameters and gradients that the axis `shard` has at a time."""
    total = sum(p.nbytes for p in model.parameters())
    if job.strategy.zero < 3:
        return 2 * total
    sizes = [sum(p.nbytes for p in block.parameters()) for block in blocks(model)]
    # A block and the next one, each as it arrives and laid out; gradients of two, as they leave and as they arrive.
    return total - sum(sizes) + 8 * max(sizes, default=0)
