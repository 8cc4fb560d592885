"""What the dry run computes: a step of training and a batch of validation, alone, so that what breaks breaks here."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

import verbund
from verbund import metrics
from verbund.cluster.worker import describe
from verbund.data.loader import Batch, Item, Loader, Transform
from verbund.data.order import Order
from verbund.data.prepare import Prepared
from verbund.data.samples import Samples
from verbund.errors import DataError, InputError, JobError, RunFailed, TaskError, VerbundError
from verbund.job import Job, Strategy
from verbund.mesh import device
from verbund.mesh.axes import Division, Mesh
from verbund.mesh.forward import Tables, call
from verbund.mesh.groups import Groups
from verbund.mesh.probe import Probe, probe
from verbund.mesh.replica import Replica
from verbund.stage.island import augmentation, example_of
from verbund.stage.layers import Layers
from verbund.stage.outputs import Outputs
from verbund.stage.unbuilt import follow
from verbund.stage.validate import wanted
from verbund.task import Task

_OWN = str(Path(verbund.__file__).parent)
# Samples of the global batch that are enough to see whether a buffer depends on how they are divided.
_PROBED = 8
T = TypeVar("T")


class DryRun:
    """A replica of its own that takes one step.

    Args:
        job: the job.
        task: the user's functions.
        prepared: the data that `train_set` was opened from, for what its statistics tell.
        train_set: what would be trained on.
        order: of the samples.
        total_steps: as far as they are bounded.
        unbuilt: the model without values, where it does not fit into this process: nothing is computed then, but
            shapes are.
        take_tables: takes the embedding tables out of the model, where they will lie elsewhere.
    """

    def __init__(
        self,
        job: Job,
        task: Task,
        prepared: Prepared,
        train_set: Samples,
        order: Order,
        total_steps: int | None,
        unbuilt: nn.Module | None = None,
        take_tables: Callable[[nn.Module], Tables] | None = None,
    ) -> None:
        self._outputs = Outputs(task)
        self._job, self._task, self._prepared = job, self._outputs.watched, prepared
        self._train_set, self._order = train_set, order
        alone = job.model_copy(update={"strategy": Strategy()})
        place = device.choose(0, job.neighbours)
        self.replica = Replica(self._task, alone, Mesh(), Groups.alone(place), unbuilt=unbuilt, take_tables=take_tables)
        self._built = unbuilt is None
        self.activations = 0
        """Bytes that a forward pass keeps, of a model that was not built."""
        batch_workers = Mesh.of(job.strategy, 0).batch_workers
        self.division = Division(batch_workers, self.replica.division.unit, job.train.micro_batch)
        """How the mesh of the job divides a global batch."""
        self._layers = Layers(self.replica.model)
        last = order.tickets_per_epoch - 1
        reached = total_steps is None or total_steps > last
        self._sizes = sorted({order.size(0), *([order.size(last)] if reached else [])}, reverse=True)

    def work(self, validation_set: Samples | None) -> list[str]:
        """Takes a step and evaluates a batch.

        Returns:
            notes for the user.

        Raises:
            InputError: naming what would fail in the training.
        """
        self._check_groups()
        low, high = self._first_pass()
        self.whole: Probe | None = None
        if not self._built:
            self.batch = self._attempt(lambda: self._batch(low, high))
            self.activations = self._attempt(lambda: follow(self.replica, self._task, self.batch))
            self._check_single_samples()
            return []
        self.whole = self._attempt(self._probe) if self._compared() else None
        self.batch = batch = self._attempt(lambda: self._batch(low, high))
        before = _versions(self.replica)
        self._attempt(lambda: self._step(batch))
        self._check_finite(batch)
        changed = [name for name, version in _versions(self.replica).items() if before.get(name) != version]
        self.replica.buffers.add(len(batch.ids))
        self._check_single_samples()
        notes = self._check_buffers(changed)
        if validation_set is not None:
            self._attempt(lambda: self._evaluate(validation_set))
        return notes

    def _compared(self) -> bool:
        """Whether the mesh cuts the model so that it has to be compared with the whole."""
        mesh = Mesh.of(self._job.strategy, 0)
        return mesh.tensor * mesh.pipeline > 1 and self._job.train.randomness == "sample"

    def _probe(self) -> Probe:
        return probe(self.replica, example_of(self._train_set))

    def _first_pass(self) -> tuple[int, int]:
        """The samples of global batch 0 that the first worker's first forward pass has."""
        size, division = self._order.size(0), self.division
        low, high = next(p for worker in range(division.workers) for p in division.micro_batches(size, worker))
        if self._whole_batch:
            # One worker's single sample has no variance, but it is never alone.
            high = min(max(high, low + 2), size)
        return low, high

    @property
    def _whole_batch(self) -> bool:
        return self.replica.statistics and self._job.train.batch_norm == "global"

    def _batch(self, low: int, high: int) -> Batch:
        ids = np.ascontiguousarray(self._train_set.ids(self._order.positions(0))[low:high])
        return _read(self._train_set, Item(0, ids), augmentation(self._job, self._task))

    def _step(self, batch: Batch) -> None:
        try:
            self.replica.dry_step(batch, self._order.size(0))
        except Exception:
            if self._job.train.compile:
                # What is wrong with the model itself is told better without the compiler.
                with self._layers.followed():
                    self._train_forward(batch)
            raise

    def _attempt(self, action: Callable[[], T]) -> T:
        """Does it; what it raises is told with the layer that it happened in, or with the data that explain it."""
        try:
            if self._job.train.compile:  # hooks would be compiled along
                result = action()
            else:
                with self._layers.followed():
                    result = action()
        except Exception as error:
            self._check_classes()
            raise self._explained(error) from error
        self._check_classes()
        return result

    def _explained(self, error: Exception) -> VerbundError:
        if isinstance(error, RunFailed) and (error.where or "").startswith("dataset()"):
            return TaskError(error.what, where=error.where, fix=error.fix)
        cause = error.__cause__ if isinstance(error, RunFailed) and isinstance(error.__cause__, Exception) else error
        if isinstance(cause, VerbundError):
            return cause
        record = describe(cause)["error"]
        if isinstance(cause, MemoryError) or record["fix"]:
            return RunFailed(record["what"], where=record["where"], fix=record["fix"])
        what, where, fix = record["what"], record["where"] or "", None
        failed = self._layers.failed()
        if "site-packages" in where or where.startswith((_OWN, os.path.dirname(os.__file__))):
            where = "model()" if failed else str(self._task.file)
        if failed is not None:
            described, fix = failed
            what = f"{what}; {described}"
        elif "does not require grad" in what:
            fix = "Nothing that is trained enters the loss: look for detach(), no_grad() or .data"
        return TaskError(what, where=where, fix=fix)

    def _check_classes(self) -> None:
        layer = self._layers.maker(self._outputs.shape)
        if problems := self._outputs.classes_without_output(self._job, self._prepared, layer):
            raise JobError(problems)

    def _check_finite(self, batch: Batch) -> None:
        """Whether the loss is a number before anything was learnt."""
        row = self._outputs.not_finite
        if row is None or self._job.train.precision == "fp16":
            return
        sample = int(batch.ids[row])
        for name, values in batch.columns.items():
            if values.is_floating_point() and not bool(values[row].isfinite().all()):
                value = values[row][~values[row].isfinite()].reshape(-1)[0]
                raise DataError(
                    f"`{name}` of sample {sample} has {float(value)} in it, and so has the loss",
                    where="data",
                    fix="Fill such values, leave the sample out, or treat them in the task",
                )
        raise TaskError(
            f"the loss of sample {sample} is not finite with the model's first weights, though its data are",
            where=str(self._task.file),
            fix="Look at what the model and the loss make of it: logarithms, divisions and roots of 0, large numbers",
        )

    # -- samples that are computed together ----------------------------------------------------------------------

    def _check_groups(self) -> None:
        if self._job.train.group > 1 or self._whole_batch:
            return
        if self.replica.statistics or self._task.couples:
            what = "batch statistics over groups of 1 sample say nothing"
            if self._task.couples:
                what = "`couples` says that samples interact, but groups of 1 sample have no other"
            raise InputError(what, where="train.group", fix="Give at least 2")

    def _check_single_samples(self) -> None:
        """Whether the model can take the group of one sample that is left over in some global batch, if there is."""
        if not self.replica.statistics:
            return
        group = self._job.train.group
        size = next((size for size in self._sizes if size == 1 or (not self._whole_batch and size % group == 1)), None)
        if size is None:
            return
        try:
            self._train_forward(self._batch(0, 1))
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
        except TaskError as error:
            if error.where != "train.batch_norm":
                raise
        else:
            return
        last = (
            "the last global batch of an epoch" if size == self._order.size(self._order.tickets_per_epoch - 1) else ""
        )
        who = f"{last or 'a global batch'} has {size} sample{'s' if size > 1 else ''}"
        if size > 1:
            who += f", of which groups of {group} leave 1 alone"
        fix = f"Change `train.global_batch`; there are {len(self._train_set)} samples in an epoch"
        if (better := self._better_group()) is not None:
            fix = f"Set `train.group` to {better}, or change `train.global_batch`"
        raise InputError(
            f"{who}: batch statistics of one sample have no variance",
            where="train.global_batch" if size == 1 else "train.group",
            fix=fix,
        )

    def _better_group(self) -> int | None:
        group = self._job.train.group
        candidates = sorted(range(2, 2 * group + 2), key=lambda g: abs(g - group))
        return next((g for g in candidates if all(size % g != 1 for size in self._sizes)), None)

    def _train_forward(self, batch: Batch) -> None:
        if not self._built:
            follow(self.replica, self._task, batch)
            return
        columns = {name: value.to(self.replica.device) for name, value in batch.columns.items()}
        self.replica.model.train()
        with torch.no_grad(), self.replica.randomness.active(0, torch.from_numpy(batch.ids)):
            call(self.replica.model, self._task.inputs(columns))

    # -- buffers -------------------------------------------------------------------------------------------------

    def _check_buffers(self, changed: list[str]) -> list[str]:
        """Whether what a forward pass does to the buffers that it changes depends on how samples are divided.

        The same samples in one pass and in two must give the same. Units of samples that are always computed together
        cannot be divided, and with statistics over the global batch a pass alone is not what it is in company.
        """
        model = self.replica.model
        size = min(self._order.size(0), _PROBED)
        if not changed or self.division.unit > 1 or self._whole_batch or size < 2:
            return []
        if self._job.train.randomness != "sample":
            return []
        start = _copies(self.replica, changed)
        results = []
        for cuts in ([0, size], [0, -(-size // 2), size]):
            self.replica.buffers.begin(first=True)
            for low, high in pairwise(cuts):
                try:
                    self._train_forward(self._batch(low, high))
                except TaskError as error:
                    if error.where == "train.randomness":
                        return []  # it draws in a way that does not go with so few samples
                    raise
                self.replica.buffers.add(high - low)
            self.replica.buffers.apply(self.replica.buffers.flat(), size)
            results.append(_copies(self.replica, changed))
            for name, tensor in model.named_buffers():
                if name in start and tensor.shape == start[name].shape:
                    tensor.copy_(start[name])
        different = [name for name in start if _differ(start[name], *(result.get(name) for result in results))]
        if not different:
            return []
        kept = set(model.state_dict())
        what = (
            f"the buffer `{different[0]}` changes in training by an amount that depends on how a batch is divided"
            if different[0] in kept
            else f"the buffer `{different[0]}` keeps something of the samples of a forward pass, but is no part of the "
            "model's state"
        )
        fix = (
            "Change it by a mean over the samples, as BatchNorm does, or write `couples = True` in the task file: then "
            "it always sees `train.group` samples at a time"
        )
        if self._job.world > 1 or self._job.train.micro_batch:
            raise TaskError(what, where="model()", fix=fix)
        return [f"{what[0].upper()}{what[1:]}: more workers will give other numbers. {fix}"]

    # -- validation ----------------------------------------------------------------------------------------------

    def _evaluate(self, samples: Samples) -> None:
        """The first evaluation batch, and what is made of it."""
        job, replica = self._job, self.replica
        ids = samples.ids(np.arange(min(job.validate_.batch, len(samples))))
        batch = _read(samples, Item(0, ids, training=False), None)
        with replica.evaluation.active():
            evaluated = replica.evaluation.evaluate(batch)
            assert evaluated is not None, "a replica of one process has the outputs"
            output, targets, sums = evaluated
            own = self._task.metrics(output, targets) if self._task.metrics else None
        evaluator = metrics.Evaluator(wanted(job), job.train.objective)
        evaluator.add(0, output, targets, sums, ids, own)
        values = evaluator.merge([evaluator.state()], batches=1, samples=len(ids))
        for key, end in (("target", job.train.target), ("patience", job.train.patience)):
            if end is not None and not isinstance(values.get(end.metric), (int, float)):
                known = ", ".join(name for name, value in values.items() if isinstance(value, (int, float)))
                raise InputError(
                    f"`{end.metric}` is no metric of this job", where=f"train.{key}", fix=f"There are: {known}"
                )


def _read(samples: Samples, item: Item, transform: Transform | None) -> Batch:
    loader = Loader(samples, iter([item]), transform=transform)
    try:
        return next(iter(loader))
    finally:
        loader.close()


def _versions(replica: Replica) -> dict[str, tuple[int, int]]:
    return {name: (id(tensor), tensor._version) for name, tensor in replica.model.named_buffers()}


def _copies(replica: Replica, names: list[str]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in replica.model.named_buffers() if name in names}


def _differ(start: Tensor, one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two ends differ by more than the order of sums explains. One of another shape is a cache."""
    if one is None or other is None or not start.shape == one.shape == other.shape or not start.numel():
        return False
    if one.is_complex():
        start, one, other = torch.view_as_real(start), torch.view_as_real(one), torch.view_as_real(other)
    if not one.is_floating_point():
        return not torch.equal(one, other)
    exact = max(1e-5, 4 * torch.finfo(one.dtype).eps)
    start, one, other = start.double(), one.double(), other.double()
    change = float((one - start).abs().max())
    return float((one - other).abs().max()) > 1e-3 * change + exact * float(one.abs().max())
