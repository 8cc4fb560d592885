"""The replica: one model as an island trains it, whatever its division."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from verbund.checkpoint.piece import Piece
from verbund.cluster.watched import ADDING_UP
from verbund.data.loader import Batch
from verbund.errors import InputError, TaskError
from verbund.job import Job, Train
from verbund.mesh import activation_checkpointing, batch_statistics, equality, optimizer
from verbund.mesh.axes import Division, Mesh
from verbund.mesh.balance import Balance
from verbund.mesh.compression import GradientCompression
from verbund.mesh.data import GradientSums, StepSums
from verbund.mesh.divide import divide, example_call, refuse, whole
from verbund.mesh.ema import ExponentialMovingAverage
from verbund.mesh.evaluation import Evaluation
from verbund.mesh.forward import ForwardPass, Tables
from verbund.mesh.gradients import add_up, norm
from verbund.mesh.groups import Groups
from verbund.mesh.initial.begin import begin
from verbund.mesh.initial.of_task import first_values
from verbund.mesh.optimizer_step import OptimizerStep
from verbund.mesh.own_seconds import TOLD, OwnSeconds
from verbund.mesh.passes import Passes
from verbund.mesh.state import State
from verbund.mesh.tensor import layers
from verbund.mesh.tensor.loss import vocabulary_parallel
from verbund.observe.events import Journal, index_among
from verbund.randomness import SampleRandomness, WorkerRandomness
from verbund.tables import train_densely
from verbund.task import Task

Doing = Callable[[str, int], None]
_PLANNED = 4
"""Batches that a loader has in its hands besides those that wait."""


class Replica:
    """The model, its optimiser, and the sums over the island's workers.

    Args:
        task: the user's functions.
        job: the whole job.
        mesh: the island's axes.
        groups: this worker's peers along them.
        doing: is told what the process does from now on.
        example: some samples, where the mesh divides the model.
        costs: of each layer, for pipeline stages.
        deferred: build the model without values and fill only this worker's part, if its constructor allows it.
        unbuilt: the task's model without values, where it is only to be looked at.
        take_tables: takes the embedding tables out of the model, where they lie elsewhere.
    """

    def __init__(
        self,
        task: Task,
        job: Job,
        mesh: Mesh,
        groups: Groups,
        doing: Doing = lambda *_: None,
        example: Batch | None = None,
        costs: list[float] | None = None,
        deferred: bool = False,
        unbuilt: nn.Module | None = None,
        take_tables: Callable[[nn.Module], Tables] | None = None,
    ) -> None:
        self.task = task
        self.train: Train = job.train
        self.strategy = job.strategy
        self.mesh = mesh
        self.groups = groups
        self.device = groups.island.device
        self.doing = doing
        begun = begin(task, job, self.device, deferred and mesh.divides_model, unbuilt, take_tables)
        model, recorded, tables = begun.model, begun.recorded, begun.tables
        self.model = model
        if tables is not None and tables.names and mesh.divides_model:
            raise InputError(
                f"the table `{tables.names[0]}` lies on servers, and the mesh divides the model",
                where="strategy.mesh",
                fix="Use the axis `data` alone, or an embedding that is neither sparse nor a `Table`",
            )
        self.densely = train_densely(model)
        """Tables that were declared sparse, and are trained with dense gradients."""
        if not any(p.requires_grad for p in model.parameters()) and not (tables is not None and tables.names):
            raise TaskError("no parameter of the model requires a gradient", where=str(task.file))
        self.statistics = batch_statistics.has_batch_statistics(model)
        self._whole_batch = self.statistics and job.train.batch_norm == "global"
        if job.train.randomness == "sample":
            self.randomness: SampleRandomness | WorkerRandomness = SampleRandomness(model, job.seed)
        else:
            self.randomness = WorkerRandomness(model, job.seed, mesh.batch_worker)
        keyed = self.randomness if isinstance(self.randomness, SampleRandomness) else None
        # Inside of what gathers a block's parameters, which holds for the repetition too.
        activation_checkpointing.apply(model, job.train.activation_checkpointing, self.randomness.context_fn)
        if mesh.divides_model:
            assert example is not None, "a mesh that divides the model needs an example"
            refuse(job, mesh, model, self.statistics)
            call_example = example_call(task, example.columns)
            self.divided = divide(model, task, job, mesh, groups, keyed, call_example, costs)
            if recorded is not None:
                recorded.fill(
                    lambda name, values: self.divided.load(name, first_values(task, name, values), self.device)
                )
        else:
            self.divided = whole(model)
        divided = self.divided
        if divided.pipeline is not None:
            divided.pipeline.stages.install()
        self.axis, self.shards, self.pipeline = divided.axis, divided.shards, divided.pipeline
        trained = divided.trained
        self.names = [held.name for held in trained]
        self.parameters = [held.values for held in trained]
        if not trained:  # all that this worker's stages hold is frozen
            self.names, self.parameters = [""], [_placeholder(model)]
        named = list(zip(self.names, self.parameters, strict=True))
        elsewhere = tables.names if tables is not None else []
        self.optimizer = optimizer.build(named, job.train.optimizer, [*divided.names, *elsewhere])
        self.ema: ExponentialMovingAverage | None = None
        if job.train.ema is not None:
            self.ema = ExponentialMovingAverage(named, job.train.ema)
        self.state = State(model, divided, self.optimizer, self.ema, mesh)
        self.loss_scale = optimizer.LossScale(job.train.loss_scale) if job.train.precision == "fp16" else None

        unit = job.train.group if task.couples or (self.statistics and not self._whole_batch) else 1
        self.division = Division(mesh.size("data", "shard"), unit, job.train.micro_batch, Division.passes_of(mesh))
        """How an island's share of a global batch is divided, if all workers have even shares."""
        self._lead = job.data.prefetch * (job.data.loaders + 1) + _PLANNED
        self._apart = job.data.placement == "island"
        self.balance = self._balanced()
        """Who has which samples."""
        self._busy = OwnSeconds(speaks=mesh.place("tensor", "pipeline") == 0)
        synchronised: batch_statistics.Synchronised | None = None
        if self._whole_batch:
            synchronised = batch_statistics.synchronise(
                model,
                self._busy.blocking(
                    lambda tensor: self.groups.batch.all_reduce(tensor, "the all-reduce of batch statistics")
                ),
            )
        self.buffers = batch_statistics.BufferDeltas(model)
        beyond = (groups.shard, groups.model) if mesh.divides_model else ()
        self.compression: GradientCompression | None = None
        if job.strategy.compression.name != "none":
            self.compression = GradientCompression(job.strategy.compression, trained, mesh, job.seed, self.shards)
        slots = TOLD * self.balance.workers
        self._sums = GradientSums(self.parameters, groups.data, self.buffers.size, beyond, self.compression, slots)
        self._summing = mesh.peers("data") if job.strategy.exchange.local else mesh.peers("islands", "data")
        objective = None if "loss" in task.own else job.train.objective
        local = vocabulary_parallel(task.loss, objective, divided.columns, self.axis)
        local_logits = local is not None and divided.output_is_last
        loss = local if local is not None and local_logits else task.loss
        for column in divided.columns:
            column.local = local_logits
        called: Callable[..., Any] = torch.compile(model) if job.train.compile else model
        self._forward = ForwardPass(called, task, loss, job.train, self.randomness, self.device, synchronised)
        self.tables = tables
        self.evaluation = Evaluation(model, task, divided, self._forward, local_logits, self.speaks, self.ema)
        self.optimizer_step = OptimizerStep(
            job.train, self.optimizer, self._sums, self.buffers, self.loss_scale, self.ema, self._norm, self._agree
        )
        # Collectives of the passes themselves must not change places with those of the buckets.
        before_last = self._sums.overlap if not self.joins_forward else lambda: None
        self._passes = Passes(model, divided, self._forward, self.buffers, mesh, job.strategy, before_last)

    @property
    def speaks(self) -> bool:
        """Whether this worker is the one of its data replica's that has the model's outputs."""
        return self.mesh.place("tensor") == 0 and (self.pipeline is None or self.pipeline.holds_last())

    @property
    def joins_forward(self) -> bool:
        """Whether the forward pass has collectives with workers that have other samples, so that a worker without
        samples must still make one."""
        return self.groups.batch.world > 1 and (self._whole_batch or self.mesh.shard > 1)

    @property
    def tables(self) -> Tables | None:
        """What brings the rows that the task's `rows` names, where tables lie elsewhere."""
        return self._forward.tables

    @tables.setter
    def tables(self, tables: Tables | None) -> None:
        self._forward.tables = tables

    def regroup(self, mesh: Mesh, groups: Groups) -> None:
        """Shares the samples with these peers from now on.

        Args:
            mesh: as before, one that does not divide the model.
            groups: of it.
        """
        self.mesh, self.groups = mesh, groups
        self.state = replace(self.state, mesh=mesh)
        self.division = replace(self.division, workers=mesh.size("data", "shard"))
        self._summing = mesh.peers("islands", "data")
        self.balance = self._balanced()
        self._sums.regroup(groups.data, TOLD * self.balance.workers)

    def _balanced(self) -> Balance:
        joint = not self.strategy.exchange.local
        return Balance(self.mesh, self.division, self.strategy.stragglers, joint, self._lead, self._apart)

    def joint(self, sizes: Sequence[int]) -> Sequence[int]:
        """Of the islands' shares of a global batch those whose gradients are added up."""
        mine = self.mesh.island
        return sizes[mine : mine + 1] if self.strategy.exchange.local else sizes

    def plan(self, sizes: Sequence[int], step: int) -> list[tuple[int, int, bool]]:
        """This worker's forward passes over its island's share of a global batch: half-open ranges, and whether it only
        takes part, with samples that weigh nothing. Where the passes have collectives all workers have the same number.

        Args:
            sizes: the samples of each island's share.
            step: whose global batch it is.
        """
        worker, division, size = self.mesh.place("data", "shard"), self.balance.inside(step), sizes[self.mesh.island]
        if not self.joins_forward:
            return [(low, high, False) for low, high in division.micro_batches(size, worker)]
        islands = [self.mesh.island] if self.strategy.exchange.local else range(self.mesh.islands)
        most = max(self.balance.inside(step, each).passes_together((sizes[each],)) for each in islands)
        mine = [(low, high, False) for low, high in division.in_passes(size, worker, most)]
        return mine + [(0, min(division.unit, max(sizes)), True)] * (most - len(mine))

    # -- training ------------------------------------------------------------------------------------------------

    def gradients(
        self, batches: Iterator[Batch], count: int, step: int, sizes: Sequence[int], flag: float, journal: Journal
    ) -> StepSums:
        """Forward and backward passes of this worker's share of a global batch; leaves the gradients' undivided sums.

        Args:
            batches: where this worker's micro-batches come from.
            count: how many of them belong to this step; may be 0.
            step: the optimiser step, which is the ticket.
            sizes: the samples of each island's share.
            flag: added up over those workers: a reason to stop after this step, or 0.
            journal: gets the spans.

        Raises:
            RunFailed: from the user's model or loss, with the samples concerned.
        """
        self._busy.begin(self.shards.traffic if self.shards is not None else None)
        self.model.train()
        joint = self.joint(sizes)
        size = sum(joint)
        place = self.mesh.place("data", "shard")
        low, high = self.balance.inside(step).share(sizes[self.mesh.island], place)
        leading = len(joint) == 1 or not any(joint[: self.mesh.island])
        self._sums.begin(step, self.loss_scale.scale if self.loss_scale else 1.0)
        self.buffers.begin(first=leading and low == 0 < high)
        if self.shards is not None:
            self.shards.begin()
            self.shards.casts.begin(step, self._sums.exact)
            self.shards.gather_rest(training=True)
        self.doing("computing", step)
        scale = (self.loss_scale.scale if self.loss_scale else 1.0) / max(size, 1)
        clock = time.monotonic_ns
        loss, weight, start = self._passes.run(self._busy.reading(batches), count, step, scale, journal)
        self._collect_gradients(step)
        if not self.speaks:
            loss, weight = 0.0, 0.0
        self.doing(ADDING_UP, step)
        told = (TOLD * self.balance.place, self._busy.end())
        extra = self.buffers.flat() if self.buffers.size else None
        reduced = self._sums.finish(loss, weight, flag, extra, told)
        self.doing("computing", step)
        stamps = self._sums.stamps
        journal.add("compute", step, start, stamps[0].blocked if stamps else clock())
        if self.compression is not None and stamps:
            for former, later in pairwise(stamps):
                journal.add("compute", step, former.done, later.blocked)
            journal.add("compute", step, stamps[-1].done, clock())
        for index, stamp in enumerate(stamps):
            number = index_among(self._summing, self.mesh.world, index)
            journal.collective(step, number, stamp.arrival, stamp.blocked, stamp.done)
        journal.share(step, high - low, weight)
        for part in (self.axis, self.shards):
            if part is not None:
                part.traffic.write(journal, step)
        shares = self.balance.record(step, sizes, reduced.told[::TOLD])
        if shares is not None and self.mesh.rank == 0:
            journal.event("shares", step=step, samples=shares)
        return reduced

    def _collect_gradients(self, step: int) -> None:
        """Gradients of shares, of tied parameters, and of those of which each worker has only its part."""
        if self.shards is not None:
            self.doing("distributing gradients", step)
            self.shards.finish()
        if self.axis is not None:
            layers.forget(self.model)
            add_up([held for held in self.divided.trained if held.partial], self.groups.tensor)
        for group, tied in self.divided.tied:
            add_up(tied, group)

    def _norm(self, gradients: list[Tensor]) -> float:
        """The global norm of the gradients, over all workers that hold some."""
        if not self.mesh.divides_model:
            return float(torch.nn.utils.get_total_norm(gradients))
        with self._busy.blocked():
            return norm(self.divided.trained, self.groups.replica)

    def _agree(self) -> None:
        with self._busy.blocked():
            self.groups.agree("the agreement on a step")

    def update(
        self,
        step: int,
        sizes: Sequence[int],
        sums: StepSums,
        total_steps: int | None,
        correct: Callable[[], None] | None = None,
    ) -> bool:
        """Takes the optimiser's step with the sums of the islands' shares of these sizes; see `OptimizerStep.take`."""
        with self._busy.between():
            return self.optimizer_step.take(step, sum(self.joint(sizes)), sums, total_steps, correct)

    def settle(
        self, sizes: Sequence[int], sums: StepSums, elsewhere: Callable[[], float], clips: bool = True
    ) -> float | None:
        """What the gradients must be multiplied by, where others take the step; see `OptimizerStep.settle`."""
        return self.optimizer_step.settle(sum(self.joint(sizes)), sums, elsewhere, clips)

    @contextmanager
    def uncompressed(self) -> Iterator[None]:
        """Within the block gradients are added up as they are."""
        self._sums.exact = True
        try:
            yield
        finally:
            self._sums.exact = False

    def dry_step(self, batch: Batch, size: int) -> None:
        """One micro-batch forward and backward and an optimiser step, alone: shows what breaks, and what is needed."""
        self.model.train()
        self._sums.begin()
        self.buffers.begin(first=True)
        (self._forward.loss(batch, 0).total.sum() / size).backward()
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise TaskError(
                    f"`{name}` has sparse gradients, which are not added up over workers",
                    where=str(self.task.file),
                    fix="Call torch.nn.functional.embedding without sparse=True; of modules it is taken away",
                )
        self.optimizer.step()

    # -- state ---------------------------------------------------------------------------------------------------

    def pieces(self, kind: str) -> Iterator[Piece]:
        """What this replica holds of `kind`; see `State.pieces` and, for `exchange`, which no two replicas have alike,
        `GradientCompression.pieces`."""
        if kind == "exchange":
            return self.compression.pieces() if self.compression is not None else iter(())
        return self.state.pieces(kind)

    def held_bytes(self) -> dict[str, int]:
        """Bytes of tensors that this worker keeps between steps, by kind; see `State.held_bytes`."""
        mine = self.state.held_bytes()
        if self.compression is not None:
            mine["compression"] = self.compression.held_bytes()
        return mine

    def check_equal(self, step: int) -> None:
        """Compares all replicas that add up their gradients; see `equality.check`."""
        equality.check(self.names, self.parameters, self.groups.data, self._summing, step)

    def pipeline_plan(self, sizes: Sequence[int]) -> dict[str, Any]:
        """What the journal has to know of the pipeline: its schedule, and how often it runs in a global batch."""
        return {
            "schedule": self.strategy.schedule,
            "ranks": self.mesh.pipeline,
            "chunks": self.strategy.stages_per_worker,
            "micro_batches": len(self.plan(sizes, 0)),
        }


def _placeholder(model: nn.Module) -> nn.Parameter:
    """A parameter without elements, which is trained and saved nowhere."""
    first = next(model.parameters(), None)
    return nn.Parameter(torch.zeros(0, dtype=first.dtype if first is not None else torch.float32))
