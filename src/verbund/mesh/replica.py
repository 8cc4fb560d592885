"""The replica: one model as an island trains it, whatever its division."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verbund import objectives
from verbund.checkpoint.piece import Piece
from verbund.cluster.worker import describe
from verbund.comm.collectives import Group
from verbund.data.loader import Batch
from verbund.errors import DataError, RunFailed, TaskError, VerbundError
from verbund.job import Job, Train
from verbund.mesh import activation_checkpointing, batch_statistics, optimizer, schedule
from verbund.mesh.axes import Division, Mesh
from verbund.mesh.data import GradientSums, StepSums
from verbund.mesh.ema import ExponentialMovingAverage
from verbund.observe.events import Journal
from verbund.randomness import SampleRandomness, WorkerRandomness
from verbund.sums import Sums
from verbund.task import Task

_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Doing = Callable[[str, int], None]


class Replica:
    """The model, its optimiser, and the sums over the island's workers.

    Args:
        task: the user's functions.
        job: the whole job.
        mesh: the island's axes.
        group: the workers of the axis `data`.
        doing: is told what the process does from now on.
    """

    def __init__(self, task: Task, job: Job, mesh: Mesh, group: Group, doing: Doing = lambda *_: None) -> None:
        self.task = task
        self.train: Train = job.train
        self.mesh = mesh
        self.group = group
        self.device = group.device
        self._doing = doing
        seed_everything(job.seed)
        if not job.train.compile:
            optimizer.without_dynamo()
        model = task.build().to(self.device)
        self.model = model
        self.names = [name for name, p in model.named_parameters() if p.requires_grad]
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        if not self.parameters:
            raise TaskError("no parameter of the model requires a gradient", where=str(task.file))
        self.optimizer = optimizer.build(list(zip(self.names, self.parameters, strict=True)), job.train.optimizer)
        self.ema: ExponentialMovingAverage | None = None
        if job.train.ema is not None:
            named = list(zip(self.names, self.parameters, strict=True))
            self.ema = ExponentialMovingAverage(named, job.train.ema)
        self.loss_scale = optimizer.LossScale(job.train.loss_scale) if job.train.precision == "fp16" else None

        self.statistics = batch_statistics.has_batch_statistics(model)
        self._whole_batch = self.statistics and job.train.batch_norm == "global"
        unit = job.train.group if task.couples or (self.statistics and not self._whole_batch) else 1
        self.division = Division(mesh.data, unit, job.train.micro_batch)
        self._synchronised: batch_statistics.Synchronised | None = None
        if self._whole_batch:
            self._synchronised = batch_statistics.synchronise(
                model, lambda tensor: group.all_reduce(tensor, "the all-reduce of batch statistics")
            )
        if job.train.randomness == "sample":
            self.randomness: SampleRandomness | WorkerRandomness = SampleRandomness(model, job.seed)
        else:
            self.randomness = WorkerRandomness(model, job.seed, mesh.rank)
        activation_checkpointing.apply(model, job.train.activation_checkpointing, self.randomness.context_fn)
        self.buffers = batch_statistics.BufferDeltas(model)
        self._sums = GradientSums(self.parameters, group, extras=self.buffers.size)
        self._call: Callable[..., Any] = torch.compile(model) if job.train.compile else model

    @property
    def joins_forward(self) -> bool:
        """Whether the forward pass has collectives, so that a worker without samples must still make one."""
        return self._whole_batch and self.mesh.world > 1

    # -- training ------------------------------------------------------------------------------------------------

    def gradients(
        self, batches: Iterator[Batch], count: int, step: int, size: int, flag: float, journal: Journal
    ) -> StepSums:
        """Forward and backward passes of one global batch; leaves the gradients' undivided sums.

        Args:
            batches: where this worker's micro-batches come from.
            count: how many of them belong to this step; may be 0.
            step: the optimiser step, which is the ticket.
            size: the samples of the global batch.
            flag: added up over the workers: a reason to stop after this step, or 0.
            journal: gets the spans.

        Raises:
            RunFailed: from the user's model or loss, with the samples concerned.
        """
        self.model.train()
        low, high = self.division.share(size, self.mesh.rank)
        self._sums.begin()
        self.buffers.begin(first=low == 0 < high)
        loss: float | Tensor = 0.0
        weight = 0.0
        scale = (self.loss_scale.scale if self.loss_scale else 1.0) / size
        self._doing("computing", step)
        clock = time.monotonic_ns
        for index in range(count):
            before = clock()
            batch = next(batches)
            start = clock()
            journal.add("data", step, before, start)
            sums = self._forward(batch, step)
            total = sums.total.sum()
            if index == count - 1 and not self.joins_forward:
                # Collectives of the backward pass itself must not change places with those of the buckets.
                self._sums.overlap()
            # A scalar: for anything else torch imports its symbolic shapes first, which takes half a second.
            (total * scale).backward()  # type: ignore[no-untyped-call]
            self.buffers.add(0 if batch.phantom else len(batch.ids))
            loss = loss + total.detach()
            weight += float(sums.weight.sum())
            if index < count - 1:
                journal.add("compute", step, start, clock())
        if count == 0:
            start = clock()
        self._doing("all-reduce", step)
        reduced = self._sums.finish(loss, weight, flag, self.buffers.flat() if self.buffers.size else None)
        self._doing("computing", step)
        stamps = self._sums.stamps
        journal.add("compute", step, start, stamps[0].blocked if stamps else clock())
        for index, stamp in enumerate(stamps):
            journal.collective(step, index, stamp.arrival, stamp.blocked, stamp.done)
        return reduced

    def update(self, step: int, size: int, sums: StepSums, total_steps: int | None) -> bool:
        """Divides the sums, clips by the global norm, and takes the optimiser step.

        Returns:
            False if the step was left out: an overflow in fp16, or a global batch of no weight.
        """
        self.buffers.apply(sums.extra, size)
        if sums.weight == 0:
            return False
        gradients = self._sums.gradients()
        factor = size / sums.weight / (self.loss_scale.scale if self.loss_scale else 1.0)
        if self.loss_scale is not None or self.train.clip_norm is not None:
            norm = float(torch.nn.utils.get_total_norm(gradients)) * factor
            if self.loss_scale is not None and not self.loss_scale.update(norm):
                return False
            if self.train.clip_norm is not None and norm > self.train.clip_norm:
                factor *= self.train.clip_norm / norm
        if factor != 1.0:
            torch._foreach_mul_(gradients, factor)
        schedule.apply(self.optimizer, schedule.factor(self.train.schedule, step, total_steps))
        self.optimizer.step()
        if self.ema is not None:
            self.ema.update()
        return True

    def dry_step(self, batch: Batch, size: int) -> None:
        """One micro-batch forward and backward and an optimiser step, alone: shows what breaks, and what is needed."""
        self.model.train()
        self._sums.begin()
        self.buffers.begin(first=True)
        (self._forward(batch, 0).total.sum() / size).backward()  # type: ignore[no-untyped-call]
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise TaskError(
                    f"`{name}` has sparse gradients, which are not added up over workers",
                    where=str(self.task.file),
                    fix="Build the embedding with sparse=False",
                )
        self.optimizer.step()

    def _forward(self, batch: Batch, step: int) -> Sums:
        phantom = batch.phantom
        if self._synchronised is not None:
            self._synchronised.set_weights(torch.zeros(len(batch.ids), device=self.device) if phantom else None)
        output = targets = None
        try:
            columns = self._placed(batch.columns)
            inputs, targets = self.task.inputs(columns), self.task.targets(columns)
            with self.randomness.active(step, torch.from_numpy(batch.ids)), self._autocast():
                output = call(self._call, inputs)
                sums = self.task.loss(output, targets)
        except VerbundError as error:
            raise self._bad_target(output, targets, batch) or error from None
        except Exception as error:
            raise self._bad_target(output, targets, batch) or self._explained(error, batch, step) from error
        if len(sums.total) != len(batch.ids):
            raise TaskError(
                f"the loss has {len(sums.total)} values for a batch of {len(batch.ids)} samples",
                where=str(self.task.file),
                fix="Return one value per sample: the batch must stay dimension 0 of output and targets",
            )
        return Sums(sums.total * 0.0, sums.weight * 0.0) if phantom else sums

    def _bad_target(self, output: Any, targets: Any, batch: Batch) -> DataError | None:
        """What is wrong with the data, if that is why the loss could not be computed."""
        if self.train.objective is None or targets is None:
            return None
        found = objectives.check_targets(self.train.objective, targets, output, torch.from_numpy(batch.ids))
        return DataError(found, where="data.target") if found else None

    def _explained(self, error: Exception, batch: Batch, step: int) -> RunFailed:
        """The user's exception, with the samples it happened on."""
        described = describe(error)["error"]
        ids = batch.ids
        few = ", ".join(map(str, ids[:4].tolist())) + (f", … {ids[-1]}" if len(ids) > 4 else "")
        return RunFailed(
            f"{described['what']} (step {step}, samples {few})",
            where=described["where"],
            fix=described["fix"],
        )

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.train.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=_TYPES[self.train.precision])

    def _placed(self, columns: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.device.type == "cpu":
            return columns
        return {name: value.to(self.device, non_blocking=True) for name, value in columns.items()}

    # -- evaluation ----------------------------------------------------------------------------------------------

    def evaluate(self, batch: Batch) -> tuple[Any, Any, Sums]:
        """Output, targets and loss of one evaluation batch; `averaged` decides which weights are used."""
        columns = self._placed(batch.columns)
        inputs = self.task.inputs(columns)
        with torch.inference_mode(), self._autocast():
            output = call(self.model, inputs)
            targets = self.task.targets(columns)
            return output, targets, self.task.loss(output, targets)

    def predict(self, batch: Batch) -> Any:
        """The model's output for one batch that needs no targets."""
        with torch.inference_mode(), self._autocast():
            return call(self.model, self.task.inputs(self._placed(batch.columns)))

    def averaged(self) -> AbstractContextManager[Any]:
        """Within the block the model has its moving-average weights, if the job keeps any."""
        return self.ema.swapped() if self.ema is not None else nullcontext()

    # -- state ---------------------------------------------------------------------------------------------------

    def pieces(self, kind: str) -> Iterator[Piece]:
        """What this replica holds of `kind`: parameters, buffers, optimizer or ema, as boxes of global tensors.

        Under the axis `data` every worker holds everything, and each piece is owned by one worker, so that a save is
        shared among them.
        """
        for name, tensor in self._tensors(kind):
            yield Piece.whole(kind, name, tensor)

    def _tensors(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        if kind == "parameters":
            for name, parameter in self.model.named_parameters():
                yield name, parameter.detach()
        elif kind == "buffers":
            persistent = self.model.state_dict().keys()
            for name, buffer in self.model.named_buffers():
                if name in persistent:
                    yield name, buffer
        elif kind == "optimizer":
            for name, parameter in zip(self.names, self.parameters, strict=True):
                for key, value in self.optimizer.state.get(parameter, {}).items():
                    if isinstance(value, Tensor):
                        yield f"{name}/{key}", value
        elif kind == "ema" and self.ema is not None:
            yield from self.ema.named_tensors()

    def load_optimizer(self, names: list[str], read: Callable[[str], Tensor]) -> None:
        """Restores the optimiser's state from tensors named `PARAMETER/KEY`."""
        known = dict(zip(self.names, self.parameters, strict=True))
        for full in names:
            name, _, key = full.rpartition("/")
            if name in known:
                value = read(full)
                # Step counters stay where the optimiser keeps them; moments lie beside their parameter.
                device = value.device if value.dim() == 0 else known[name].device
                self.optimizer.state[known[name]][key] = value.to(device)

    def checksums(self) -> Tensor:
        """One number per parameter: the sum of its bits, exact and independent of order; shape [P], int64."""
        return torch.stack([_bit_sum(parameter.detach()) for parameter in self.parameters])

    def check_equal(self, step: int) -> None:
        """Compares the checksums of all replicas.

        Raises:
            RunFailed: naming the first tensor that differs, and the workers that differ from the majority.
        """
        if self.group.world == 1:
            return
        gathered = torch.stack(self.group.all_gather(self.checksums(), "the comparison of the replicas"))
        different = (gathered != gathered[0]).any(dim=0)
        if not bool(different.any()):
            return
        index = int(different.nonzero()[0])
        values = gathered[:, index].tolist()
        usual = max(set(values), key=values.count)
        odd = [rank for rank, value in enumerate(values) if value != usual]
        workers = f"worker{'s' if len(odd) != 1 else ''} {', '.join(map(str, odd))}"
        fix = (
            "`model()` must give the same values in every process: it is called with torch, numpy and random seeded"
            if step == 0
            else "Replicas stay equal unless the model draws or keeps something of its own per process"
        )
        raise RunFailed(
            f"the replicas differ before step {step}: `{self.names[index]}` on {workers}",
            where="train",
            fix=fix,
        )


def call(model: Callable[..., Any], inputs: Any) -> Any:
    """Calls the model with a tensor, a tuple or list of arguments, or a dict of named ones."""
    if isinstance(inputs, dict):
        return model(**inputs)
    if isinstance(inputs, (tuple, list)):
        return model(*inputs)
    return model(inputs)


def seed_everything(seed: int) -> None:
    """Seeds torch, numpy and random, so that `model()` gives the same values in every process."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def _bit_sum(tensor: Tensor) -> Tensor:
    flat = tensor.contiguous().view(-1)
    if flat.numel() * flat.element_size() % 4 == 0:
        return flat.view(torch.int32).sum(dtype=torch.int64).to(tensor.device)
    return flat.view(torch.uint8).sum(dtype=torch.int64)
