"""How a mesh divides a model: the axes `tensor`, `pipeline` and `shard`, in this order. (The axis `data` divides only
samples: see `data.py`.)"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from verbund.cluster.worker import describe
from verbund.comm.collectives import Group
from verbund.comm.compression.casts import Casts
from verbund.errors import InputError, VerbundError
from verbund.job import Job
from verbund.mesh.axes import Mesh
from verbund.mesh.forward import call
from verbund.mesh.groups import Groups
from verbund.mesh.held import Cut, Held, become
from verbund.mesh.optimizer import ELEMENTWISE
from verbund.mesh.pipeline import cut as cuts
from verbund.mesh.pipeline.run import Pipeline
from verbund.mesh.pipeline.stages import Stages
from verbund.mesh.pipeline.trace import on_meta, run_on_meta
from verbund.mesh.shard import Shards
from verbund.mesh.tensor import layers
from verbund.mesh.tensor.exchange import Axis
from verbund.mesh.tensor.layers import Column
from verbund.mesh.tensor.plan import plan
from verbund.mesh.traffic import Traffic
from verbund.randomness import SampleRandomness
from verbund.task import Task

Call = Callable[[nn.Module], Any]
"""Calls a model with the inputs of an example."""


@dataclass
class Divided:
    """A model as this worker holds it.

    Args:
        held: every parameter of which this worker holds something.
        names: all trained parameters of the whole model.
        buffers: names of the buffers that this worker speaks for.
        whole_bytes: of all parameters of the model.
        axis: the axis `tensor`.
        columns: layers that gather their outputs.
        output_is_last: whether there is one such layer and the model's output is what it gives.
        shards: the axis `shard`.
        pipeline: the axis `pipeline`.
        tied: trained parameters that several stages hold, and the workers that do.
        away: names of parameters and buffers that this worker needs none of.
    """

    held: list[Held]
    names: list[str]
    buffers: set[str]
    whole_bytes: int = 0
    axis: Axis | None = None
    columns: list[Column] = field(default_factory=list)
    output_is_last: bool = False
    shards: Shards | None = None
    pipeline: Pipeline | None = None
    tied: list[tuple[Group, list[Held]]] = field(default_factory=list)
    away: set[str] = field(default_factory=set)

    def load(self, name: str, values: Tensor, device: torch.device) -> Tensor | None:
        """Takes this worker's part of the first values of a parameter or buffer of a model that was built without any.

        Returns:
            What takes the tensor's place in the model, unless that has been seen to.
        """
        held = next((held for held in self.held if held.name == name), None)
        if held is None:
            return None if name in self.away else values.to(device)
        share = values if held.tensor_cut is None else held.tensor_cut.share(values)
        if self.shards is not None:
            self.shards.load(name, share)
        else:
            become(held.parameter, share.to(device, copy=True))
        return None

    @property
    def trained(self) -> list[Held]:
        """Those that require a gradient."""
        return [held for held in self.held if held.values.requires_grad]


def whole(model: nn.Module) -> Divided:
    """An undivided model."""
    held = [Held(name, tuple(p.shape), p, p) for name, p in model.named_parameters()]
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    size = sum(p.nbytes for p in model.parameters())
    return Divided(held, names, {name for name, _ in model.named_buffers()}, size)


def divide(
    model: nn.Module,
    task: Task,
    job: Job,
    mesh: Mesh,
    groups: Groups,
    randomness: SampleRandomness | None,
    call: Call,
    costs: list[float] | None = None,
) -> Divided:
    """Cuts a model, in place, and keeps this worker's part of it.

    Args:
        model: its parameters are whole.
        task: the user's plans.
        job: the strategy.
        mesh: the axes.
        groups: this worker's peers.
        randomness: learns which draws are cut.
        call: calls a model with an example.
        costs: of each layer, for stages; None: by the parameters' sizes.

    Raises:
        InputError: if the model cannot be cut so: which module, and what would work.
    """
    model.train()
    made = whole(model)
    if mesh.tensor > 1:
        traffic = Traffic(mesh.peers("tensor"), mesh.world, 1)
        cut_operations(model, task, made, Axis(groups.tensor, traffic), randomness, call)
    if mesh.pipeline > 1:
        _cut_layers(model, task, job, mesh, groups, made, call, costs, randomness)
    first = mesh.place("tensor") == 0
    for held in made.held:
        held.primary = (held.tensor_cut is not None or first) and mesh.place("pipeline") == _home(held, mesh)
    if mesh.place("shard") or not first:
        made.buffers = set()
    if mesh.shard > 1:
        level = job.strategy.zero
        if made.pipeline is not None and job.strategy.schedule.endswith("zero_bubble"):
            level = min(level, 2)  # the later half of a backward pass needs the parameters once more
        traffic = Traffic(mesh.peers("shard"), mesh.world, 2)
        made.shards = Shards(
            model, made.held, groups.shard, level, traffic, Casts(job.strategy.compression, groups.shard)
        )
        made.held = made.shards.held
    if made.pipeline is not None:
        made.tied = _tied(made, mesh, groups)
    return made


def _tied(made: Divided, mesh: Mesh, groups: Groups) -> list[tuple[Group, list[Held]]]:
    """Groups of the workers that hold the same parameter in different stages."""
    sets: dict[tuple[int, ...], list[Held]] = {}
    for held in made.trained:
        places = tuple(sorted({stage % mesh.pipeline for stage in held.stages}))
        if len(places) > 1:
            sets.setdefault(places, []).append(held)
    return [(groups.pipeline.part("tied", list(places)), sets[places]) for places in sorted(sets)]


def _home(held: Held, mesh: Mesh) -> int:
    return min(stage % mesh.pipeline for stage in held.stages)


def refuse(job: Job, mesh: Mesh, model: nn.Module, statistics: bool) -> None:
    """What cannot be together with a mesh that divides the model.

    Args:
        job: the job.
        mesh: the axes.
        model: before it is divided.
        statistics: whether the model has batch statistics.

    Raises:
        InputError: saying what would work.
    """
    name = job.train.optimizer.name.lower()
    if name not in ELEMENTWISE and mesh.shard * mesh.tensor > 1:
        raise InputError(
            f"`{name}` needs whole parameters, and the axes `shard` and `tensor` divide them",
            where="train.optimizer.name",
            fix=f"Use one of {', '.join(sorted(ELEMENTWISE))}, or the axes `data` and `pipeline`",
        )
    if job.train.compile:
        raise InputError(
            "`compile` is not available where the mesh divides the model",
            where="train.compile",
            fix="Leave it out, or use the axis `data` alone",
        )
    for path, module in model.named_modules():
        for hook in module._forward_pre_hooks.values():
            if type(hook).__name__ in ("WeightNorm", "SpectralNorm"):
                raise InputError(
                    f"`{path}` recomputes its weight in a hook, which a divided model cannot",
                    where="model()",
                    fix="Use torch.nn.utils.parametrizations instead of torch.nn.utils.weight_norm or spectral_norm",
                )
    if statistics and job.train.batch_norm == "global" and mesh.pipeline * mesh.tensor > 1:
        raise InputError(
            "batch statistics over the global batch are not available with the axes `tensor` and `pipeline`",
            where="train.batch_norm",
            fix='Use `batch_norm = "group"`',
        )


def uneven(made: Divided) -> list[str]:
    """A note on the parameter that is divided most unevenly over the axis `tensor`, if one is."""
    worst, name = 1.0, ""
    for held in made.held:
        if (cut := held.tensor_cut) is not None:
            lengths = [cut.length(worker) for worker in range(cut.workers)]
            ratio = max(lengths) * cut.workers / sum(lengths)
            if ratio > worst:
                worst, name = ratio, held.name
    if worst < 1.1:
        return []
    return [f"The axis `tensor` cuts `{name}` unevenly: one worker has {worst:.2f} times its fair share"]


def example_call(task: Task, columns: dict[str, Tensor]) -> Call:
    """Calls a model with the inputs of an example."""
    inputs = task.inputs(columns)
    return lambda model: call(model, inputs)


# -- the axis `tensor` -------------------------------------------------------------------------------------------


def cut_operations(
    model: nn.Module, task: Task, made: Divided, axis: Axis, randomness: SampleRandomness | None, call: Call
) -> None:
    """Cuts the modules of the model's plan of tensor parallelism, in place.

    Raises:
        InputError: naming the module that cannot be cut.
    """
    torch.backends.mha.set_fastpath_enabled(False)  # it would pass the cut modules by
    entries = plan(model, task.tensor_plan() if task.tensor_plan is not None else None)
    before = _draws(model, randomness, call)
    made.axis = axis
    found, partial, made.columns = layers.apply(model, entries, made.axis)
    shares: dict[int, nn.Parameter] = {}
    for held in made.held:
        held.partial = id(held.parameter) in partial
        if (cut := found.get(id(held.parameter))) is not None:
            share = nn.Parameter(cut.share(held.parameter.data), requires_grad=held.parameter.requires_grad)
            shares[id(held.parameter)] = share
            held.parameter = held.values = share
            held.tensor_cut = cut
    layers.replace_parameters(model, shares)
    outputs: list[Any] = []
    try:
        after = _draws(model, randomness, lambda model: outputs.append(call(model)))
    except VerbundError:
        raise
    except Exception as error:
        described = describe(error)["error"]
        raise InputError(
            f"cut by the axis `tensor`, the model fails: {described['what']}",
            where=described["where"],
            fix="Look at the plan: a `row` takes what a `column` gives. In forward, sizes must follow from the tensors "
            "(x.chunk(3, -1), view(..., -1, head_size)), not from constants",
        ) from error
    made.output_is_last = len(made.columns) == 1 and made.columns[0].last is _logits(outputs[0])
    for column in made.columns:
        column.last = None
    if randomness is not None:
        randomness.cut(_cut_draws(before, after, list(found.values()), made.axis))


def _logits(output: Any) -> Any:
    return output.get("logits") if isinstance(output, dict) else getattr(output, "logits", output)


def _draws(model: nn.Module, randomness: SampleRandomness | None, call: Call) -> dict[tuple[str, int], torch.Size]:
    tensors = on_meta(model)
    if randomness is None:
        run_on_meta(model, tensors, call)
        return {}
    with torch.no_grad():
        return randomness.probe(lambda: run_on_meta(model, tensors, call))


def _cut_draws(
    before: dict[tuple[str, int], torch.Size], after: dict[tuple[str, int], torch.Size], found: list[Cut], axis: Axis
) -> dict[tuple[str, int], tuple[int, int, int, int]]:
    """Which draws are of a share, by comparing what the whole and the cut model draw: per module and use the dimension,
    the start, the length and the whole length."""
    cut: dict[tuple[str, int], tuple[int, int, int, int]] = {}
    for key, shape in after.items():
        full = before.get(key)
        if full is not None and len(full) == 3 and len(shape) == 4 and full[0] % shape[0] == 0:
            full = torch.Size((shape[0], full[0] // shape[0], *full[1:]))  # samples and heads in one dimension
        if full is None or len(full) != len(shape):
            raise InputError(
                f"module `{key[0]}` draws random numbers of shape {list(shape)} when it is cut, and "
                f"{list(full) if full is not None else 'none'} when it is not",
                where="strategy.mesh.tensor",
                fix='Set train.randomness = "worker", or leave the module out by a `tensor_plan()` of your own',
            )
        different = [d for d in range(len(shape)) if shape[d] != full[d]]
        if not different:
            continue
        (dim,) = different
        cut[key] = (dim, *_stretch(full[dim], shape[dim], found, axis), full[dim])
    return cut


def _stretch(full: int, length: int, found: list[Cut], axis: Axis) -> tuple[int, int]:
    """Where a worker's share of `full` elements begins, and its length."""
    for units in sorted({cut.units for cut in found}, reverse=True):
        if full % units == 0:
            unit = full // units
            low, high = units * axis.worker // axis.workers * unit, units * (axis.worker + 1) // axis.workers * unit
            if high - low == length:
                return low, length
    low, high = full * axis.worker // axis.workers, full * (axis.worker + 1) // axis.workers
    if high - low != length:
        raise InputError(
            f"random numbers are drawn for {length} of {full} elements, which is no worker's share",
            where="strategy.mesh.tensor",
            fix='Set train.randomness = "worker"',
        )
    return low, length


# -- the axis `pipeline` -----------------------------------------------------------------------------------------


def starts(
    layers: cuts.Layers, job: Job, mesh: Mesh, sizes: dict[str, int], costs: Sequence[float] | None
) -> list[int]:
    """The first layer of every pipeline stage.

    Args:
        layers: of the model.
        job: how stages are to be balanced.
        mesh: the axes.
        sizes: of the whole parameters, the same on all workers.
        costs: of each layer; None: by the parameters' sizes.

    Raises:
        InputError: if there are fewer places to cut than stages.
    """
    strategy = job.strategy
    if costs is None or strategy.balance == "memory":
        costs = cuts.memory_costs(layers, sizes)
    return cuts.starts(layers, costs, mesh.pipeline, strategy.stages_per_worker)


def _cut_layers(
    model: nn.Module,
    task: Task,
    job: Job,
    mesh: Mesh,
    groups: Groups,
    made: Divided,
    call: Call,
    costs: list[float] | None,
    randomness: SampleRandomness | None,
) -> None:
    found = cuts.layers(model, task.pipeline_plan() if task.pipeline_plan is not None else None, call)
    firsts = starts(found, job, mesh, {held.name: math.prod(held.shape) for held in made.held}, costs)
    mine = set(range(mesh.place("pipeline"), len(firsts), mesh.pipeline))
    away: dict[int, nn.Parameter] = {}
    kept = []
    for held in made.held:
        stages = tuple(found.stages_of(held.name, firsts))
        if mine.intersection(stages):
            kept.append(replace(held, stages=stages))
        else:
            made.away.add(held.name)
            away[id(held.parameter)] = nn.Parameter(held.parameter.data.to("meta"), requires_grad=False)
    layers.replace_parameters(model, away)
    for name, buffer in list(model.named_buffers()):
        owner, _, key = name.rpartition(".")
        stages = tuple(found.stages_of(name, firsts)) if name in found.used else (0,)
        if name in found.used and not mine.intersection(stages):
            model.get_submodule(owner)._buffers[key] = buffer.to("meta")
            made.away.add(name)
        if min(stage % mesh.pipeline for stage in stages) != mesh.place("pipeline"):
            made.buffers.discard(name)
    made.held = kept
    made.pipeline = Pipeline(Stages(model, found.paths, firsts, randomness), groups.pipeline)
