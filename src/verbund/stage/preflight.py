"""The check of a job in a process that has torch: its settings, a dry run, and the memory that it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from verbund import metrics
from verbund import task as tasks
from verbund.cluster.worker import Worker
from verbund.data.manifest import Manifest
from verbund.data.order import Order
from verbund.data.prepare import Prepared
from verbund.data.sets import open_sets
from verbund.errors import InputError, Problem, VerbundError, nearest
from verbund.exchange.parameter_server import server_optimizer
from verbund.exchange.parameter_server.remote import RemoteTables
from verbund.job import CASTS, Compression, Job
from verbund.mesh import device, optimizer, schedule
from verbund.mesh.axes import Mesh
from verbund.mesh.replica import Replica
from verbund.observe.memory import left_to_process, peak_bytes
from verbund.stage import fit
from verbund.stage.dry_run import DryRun
from verbund.stage.federated import preflight as federated
from verbund.stage.federated.parts import parts_of
from verbund.stage.validate import wanted
from verbund.tables import begin_alike

# What a model takes beside its tensors while it takes a step: activations, and what is there for a moment.
_MARGIN = 1.25


def work(worker: Worker) -> dict[str, Any]:
    """Runs in a process of its own, so that whatever it allocates or breaks is gone with it."""
    job = Job.build(worker.settings["job"], {}, source="job.toml", folder=worker.settings["folder"])
    problems = optimizer.check(job.train.optimizer)
    if job.strategy.exchange.served and not problems:
        problems = server_optimizer.check(job.train.optimizer)
    try:
        wanted(job)
    except InputError as error:
        problems.append(Problem(error.where or "validate.metrics", error.what, error.fix))
    if problems:
        return {"problems": [{"where": p.where, "what": p.what, "fix": p.fix} for p in problems]}
    worker.supervise()
    worker.doing("checking the task", 0)
    prepared = Prepared.from_record(worker.settings["prepared"])
    columns = Manifest.read(Path(prepared.train)).names if prepared.train is not None else []
    task = tasks.load(job, columns)
    if task.metrics is None and (problems := _unmeasured(job)):
        return {"problems": [{"where": p.where, "what": p.what, "fix": p.fix} for p in problems]}
    device.use_threads(job.cluster.threads, job.neighbours)
    train_set, validation_set = open_sets(prepared, job, task)
    order = Order(len(train_set), job.train.global_batch, job.seed, train_set.block, job.data.window)
    per_epoch, parts = order.tickets_per_epoch, None
    if job.strategy.exchange.federated:
        parts = parts_of(job, train_set, prepared.train)
        per_epoch = job.strategy.exchange.rounds_per_epoch(parts.clients)
    total = total_steps(job, per_epoch)
    schedule.factor(job.train.schedule, 0, total)
    if (job.train.target or job.train.patience) and validation_set is None:
        raise InputError(
            "`target` and `patience` need validation data",
            where="train",
            fix="Give `data.validation_fraction`",
        )
    notes: list[str] = []
    unbuilt = fit.unbuilt(task, job.seed, notes) if Mesh.of(job.strategy, 0).divides_model else None
    deferred = unbuilt is not None
    process = left_to_process()
    room = min((size for size in (worker.settings["available"], process) if size is not None), default=None)
    if unbuilt is not None:
        whole = fit.dry_run_bytes(unbuilt, job)
        if room is None or _MARGIN * whole <= room:
            unbuilt = None
        else:
            notes.append(_left_out(whole, room))
    before = peak_bytes()
    take_tables = RemoteTables.install if job.strategy.exchange.served else None
    try:
        dry = DryRun(_tried(job), task, prepared, train_set, order, total, unbuilt, take_tables)
        found = dry.work(validation_set)
    except VerbundError as error:
        if not deferred and notes and "memory" in error.what:
            raise InputError(f"{error.what}. {notes[0]}", where=error.where, fix=error.fix) from error
        raise
    replica = dry.replica
    notes += [*prepared.notes, *_notes(job, dry, order), *found]
    if parts is not None:
        notes += federated.examine(job, replica, parts)
    need = fit.estimated_need(replica, job, dry.activations)
    if unbuilt is None:
        need = fit.need_of(replica, job, max(peak_bytes() - before, 0))
    parameters = sum(p.numel() for p in replica.parameters)
    suits = fit.examine(replica, task, job, dry.batch, need)
    facts = {
        "tickets_per_epoch": per_epoch,
        "total_steps": total,
        "train_samples": len(train_set),
        "validation_samples": len(validation_set) if validation_set is not None else 0,
        "parameters": parameters,
        "worker_bytes": suits.worker_bytes,
        **_table_bytes(replica, job),
        "other_meshes": suits.others,
        "process_bytes": process,
        "built": unbuilt is None,
        "costs": suits.costs,
        "deferred": deferred,
        "probe": dry.whole.record() if dry.whole is not None else None,
        "notes": [*notes, *suits.notes],
    }
    return {"problems": [], "facts": facts}


def _tried(job: Job) -> Job:
    """The job whose batches a worker has: where each island has whole tickets, that of one island."""
    exchange = job.strategy.exchange
    if not exchange.served or exchange.divided:
        return job
    return job.model_copy(update={"strategy": job.strategy.inside})


def _table_bytes(replica: Replica, job: Job) -> dict[str, int]:
    """What a checkpoint has of the tables that lie on servers: see `Facts`."""
    tables = replica.tables.tables if isinstance(replica.tables, RemoteTables) else ()
    rule = server_optimizer.ServerOptimizer(job.train.optimizer, [name for name, _ in replica.model.named_parameters()])
    sure = used = 0
    for table in tables:
        size = table.shape[0] * table.shape[1] * table.dtype.itemsize
        moments = len(rule.first_state(table.name, table.dtype).moments) if table.trained else 0
        sure += 0 if table.born else size
        used += size * (moments + (1 if table.born else 0))
    return {"table_bytes": sure, "row_bytes": used}


def _left_out(whole: int, room: int) -> str:
    return (
        f"The dry run was left out: the model takes {whole / 1e9:.1f} GB in one process, and {room / 1e9:.1f} GB are "
        "free. Shapes, names and the mesh are checked; what only values show (a loss that is not finite, buffers that "
        "depend on the division, whether the divided model computes what the whole one does) is not"
    )


def total_steps(job: Job, per_epoch: int) -> int | None:
    """The steps of the whole training, as far as epochs and steps bound it.

    Args:
        job: the job.
        per_epoch: steps of an epoch.
    """
    ends = [job.train.steps, job.train.epochs * per_epoch if job.train.epochs else None]
    return min((end for end in ends if end is not None), default=None)


def _unmeasured(job: Job) -> list[Problem]:
    """Metrics that end the training, but that validation will not measure."""
    measured = [metric.name for metric in wanted(job)]
    problems = []
    for key, end in (("target", job.train.target), ("patience", job.train.patience)):
        if end is not None and end.metric not in measured:
            fix = "Add it to `validate.metrics`" if end.metric in metrics.NAMES else nearest(end.metric, measured)
            problems.append(Problem(f"train.{key}.metric", f"`{end.metric}` is no metric of this job", fix))
    return problems


def _travel(what: str, compression: Compression, steps: int | None) -> list[str]:
    """What the user should know about a compression."""
    method, warmup = compression.name, compression.exact_steps
    if steps is not None and steps <= warmup:
        without = f"the first {warmup} steps are without compression (`compression.warmup`)"
        return [f"Nothing travels as `{method}`: {without}, and the training has {steps}"]
    return [f"{what} as `{method}`, which is inexact: results are not those of a single process"]


def _decays(job: Job) -> list[str]:
    """What becomes of an optimiser's memory where each share of a step is a step by itself."""
    if not optimizer.state_share(job.train.optimizer):
        return []
    name, islands = job.train.optimizer.name, job.strategy.islands
    decays = f"What `{name}` remembers decays with each island's share, {islands} times in a step"
    return [f"{decays} (`bounded_staleness`); `docs/islands.md` says what that means"]


def _table_notes(replica: Replica, job: Job) -> list[str]:
    """What the user should know about the model's embedding tables."""
    notes = []
    if replica.densely and job.strategy.exchange.name != "parameter_server":
        which, *others = replica.densely
        what = f"`{which}` and {len(others)} more are" if others else f"`{which}` is"
        notes.append(f"{what} declared sparse: without a parameter server the gradients are dense, which are the same")
    return notes + [
        f"{' and '.join(f'`{name}`' for name in names)} begin with equal rows: give them different seeds"
        for names in begin_alike(replica.model)
    ]


def _notes(job: Job, dry: DryRun, order: Order) -> list[str]:
    """What the user should know about how this job is divided."""
    notes = []
    size = min(job.train.global_batch, order.size(0))
    division = dry.division
    if dry.replica.statistics:
        if job.train.batch_norm == "global":
            notes.append("Batch statistics are taken over the whole global batch")
            if 0 < job.train.micro_batch < -(-size // division.workers):
                raise InputError(
                    "batch statistics over the global batch need each worker's share in one forward pass",
                    where="train.micro_batch",
                    fix='Leave out `micro_batch`, or use `batch_norm = "group"`',
                )
        else:
            notes.append(f"Batch statistics are taken over groups of {job.train.group} samples")
    idle = sum(not division.micro_batches(size, worker) for worker in range(division.workers))
    if idle:
        unit = f" in groups of {job.train.group} (`train.group`)" if division.unit > 1 else ""
        notes.append(
            f"{idle} of {division.workers} workers have nothing to do: a global batch of {size} samples is "
            f"divided{unit}"
        )
    notes += _table_notes(dry.replica, job)
    set_ = job.strategy.model_fields_set
    for axis, keys in (("pipeline", ("schedule", "chunks")), ("shard", ("zero",))):
        default = {key: type(job.strategy).model_fields[key].default for key in keys}
        given = [key for key in keys if key in set_ and getattr(job.strategy, key) != default[key]]
        if given and axis not in job.strategy.axes:
            notes.append(f"`strategy.{given[0]}` has no effect without the axis `{axis}`")
    method = job.strategy.compression.name
    if method != "none":
        exchanged = ["data", "shard"] if method in CASTS else ["data"]
        joint = job.strategy.islands if not job.strategy.exchange.local else 1
        if joint == 1 and not set(exchanged) & set(job.strategy.axes):
            notes.append("`strategy.compression` has no effect without the axis `data`")
        else:
            notes += _travel("Gradients travel", job.strategy.compression, total_steps(job, order.tickets_per_epoch))
    exchange = job.strategy.exchange
    if exchange.local and job.strategy.islands == 1:
        alone = "only its outer optimiser steps" if exchange.name == "diloco" else "it does nothing"
        notes.append(f"`strategy.exchange` `{exchange.name}` has one island and nobody to exchange with: {alone}")
    elif exchange.local:
        notes.append(f"Islands train alone (`{exchange.name}`): results are not those of a single process")
        if exchange.compression.name != "none":
            notes += _travel("Differences travel", exchange.compression, total_steps(job, order.tickets_per_epoch))
    elif exchange.served and (exchange.consistency != "bulk_synchronous" or exchange.backup):
        how = (
            "a step does not wait for all islands"
            if exchange.backup
            else f"the consistency is `{exchange.consistency}`"
        )
        notes.append(f"Results are not those of a single process: {how}")
    if exchange.consistency == "bounded_staleness" and job.strategy.islands > 1:
        notes += _decays(job)
    if exchange.served and exchange.compression.name != "none":
        notes += _travel("Gradients are pushed", exchange.compression, total_steps(job, order.tickets_per_epoch))
    if job.data.placement == "island" and job.strategy.islands == 1:
        notes.append("`data.placement` has no effect with one island")
    cores = device.cores()
    if job.neighbours > cores and not torch.cuda.is_available():
        notes.append(
            f"{job.neighbours} workers share {cores} core{'s' if cores != 1 else ''}: more workers than cores are "
            f"slower, not faster; {cores} would do"
        )
    return notes
