"""Validation: each sample exactly once, and the same result bit for bit for any number of workers.

Evaluation batches are of fixed composition: batch i holds the samples [i·b, (i+1)·b), and goes to worker i mod N. What
it yields is added in the order of the batches, in float64. Each worker computes with a number of threads that does not
depend on how many workers there are.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from verbund import metrics, objectives
from verbund.cluster.worker import Worker
from verbund.data.loader import Batch, Item, Loader
from verbund.data.prepare import Prepared
from verbund.data.samples import Samples
from verbund.errors import InputError, JobError
from verbund.job import Job
from verbund.mesh.replica import Replica
from verbund.metrics.base import Gathered
from verbund.stage.island import Island
from verbund.stage.outputs import Outputs
from verbund.stage.restore import restore

Across = Callable[[dict[str, Any]], list[dict[str, Any]]]
"""Gathers named arrays of this worker's peers in the other islands, by island."""


def work(worker: Worker) -> dict[str, Any]:
    """A worker's part of `verbund validate`."""
    island = Island.join(worker)
    outputs = Outputs(island.task)
    island.task = outputs.watched
    replica = island.replica(worker)
    source = worker.location(worker.settings["checkpoint"])
    state = restore(source, replica, weights_only=True)
    if island.validation_set is None:
        raise InputError("there is no validation data", where=str(source))
    worker.doing("validating", int(state["step"]))
    start = time.monotonic()
    try:
        values = evaluate(replica, island.validation_set, island)
    except Exception as error:
        prepared = Prepared.from_record(worker.settings["prepared"])
        if problems := outputs.classes_without_output(island.job, prepared):
            raise JobError(problems) from error
        raise
    return {
        "step": state["step"],
        "samples": len(island.validation_set),
        "metrics": values,
        "seconds": round(time.monotonic() - start, 4),
        "world": island.mesh.world,
    }


def evaluate(
    replica: Replica,
    samples: Samples,
    island: Island,
    gathered: Callable[[int, int], None] = lambda *_: None,
    across: Across | None = None,
) -> dict[str, Any]:
    """The metrics of the whole of `samples`, known to all workers.

    Args:
        replica: the model.
        samples: what it is evaluated on.
        island: who shares the work.
        gathered: is told when this worker had nothing left to do but to gather, and when all was gathered (ns).
        across: gathers arrays of this worker's peers in the other islands; see `Groups.gather`.

    Returns:
        metric name to value, always with `loss`.
    """
    job = island.job
    evaluator = metrics.Evaluator(wanted(job), job.train.objective)
    with evaluation_threads(island), replica.evaluation.active():
        for index, batch in evaluation_batches(samples, job.validate_.batch, island):
            evaluated = replica.evaluation.evaluate(batch)
            if evaluated is None or batch.phantom:
                continue
            output, targets, sums = evaluated
            own = replica.task.metrics(output, targets) if replica.task.metrics else None
            evaluator.add(index, output, targets, sums, batch.ids, own)
    state = evaluator.state()
    start = time.monotonic_ns()
    from_islands = (lambda: across(state)) if across is not None else None
    states = island.groups.gather(state, "the gathering of metrics", from_islands)
    gathered(start, time.monotonic_ns())
    batches = math.ceil(len(samples) / job.validate_.batch)
    return evaluator.merge(states, batches=batches, samples=len(samples))


def wanted(job: Job) -> list[metrics.Metric | Gathered]:
    """The job's metrics, or those that fit its objective."""
    names = job.validate_.metrics
    if names is None:
        names = objectives.default_metrics(job.train.objective)
    return metrics.build(names, job.train.objective)


def evaluation_batches(
    samples: Samples, size: int, island: Island, contiguous: bool = False
) -> Iterator[tuple[int, Batch]]:
    """This worker's evaluation batches with their numbers.

    Args:
        samples: what is evaluated.
        size: samples of a batch.
        island: who shares the work.
        contiguous: give each worker a run of batches instead of every N-th.
    """
    count = math.ceil(len(samples) / size)
    world, rank = island.mesh.batch_workers, island.mesh.batch_worker
    mine = [*(range(count * rank // world, count * (rank + 1) // world) if contiguous else range(rank, count, world))]
    taken = len(mine)
    if island.mesh.shard > 1 and count:
        # All take part in as many forward passes: what is gathered for one is gathered by all.
        mine += [0] * (-(-count // world) - taken)

    def plan() -> Iterator[Item]:
        for number, index in enumerate(mine):
            positions = np.arange(index * size, min((index + 1) * size, len(samples)))
            yield Item(index, samples.ids(positions), phantom=number >= taken, training=False)

    loader = Loader(samples, plan(), prefetch=island.job.data.prefetch)
    try:
        yield from zip(mine, loader, strict=True)
    finally:
        loader.close()


@contextmanager
def evaluation_threads(island: Island) -> Iterator[None]:
    """Within the block operations use `cluster.threads` threads, 1 by default: never a number that depends on the
    workers, since a sum's bits depend on how threads divide it."""
    former = torch.get_num_threads()
    torch.set_num_threads(island.job.cluster.threads or 1)
    try:
        yield
    finally:
        torch.set_num_threads(former)
