"""Which trainings go on without a lost worker, and with how many."""

from __future__ import annotations

from verbund.cluster.membership import Bounds
from verbund.errors import InputError
from verbund.job import Job
from verbund.mesh.axes import Mesh
from verbund.stage.refill import refills

_LEAVE = "Leave it out"


def fixed(job: Job) -> str | None:
    """Why workers of a training can neither come nor go while it goes on; None if they can.

    They can where every worker has the whole model and all that is trained, so that others get it from its memory, and
    where any number of workers comes to the same numbers.
    """
    strategy, name = job.strategy, job.strategy.exchange.name
    divides = [axis for axis in ("shard", "tensor", "pipeline") if strategy.mesh.get(axis, 1) > 1]
    if name != "all_reduce":
        return f"its islands exchange by `{name}`"
    if divides:
        return f"its mesh divides the model (axis {', '.join(f'`{axis}`' for axis in divides)})"
    if strategy.world == 1 and (job.cluster.max_workers or 1) == 1:
        return "it has a single worker, and `cluster.max_workers` takes no more"
    if (kept := _kept_by_workers(job)) is not None:
        return kept
    if job.train.batch_norm == "global":
        return '`train.batch_norm = "global"` exchanges statistics within each forward pass'
    return None


def _kept_by_workers(job: Job) -> str | None:
    """What a worker has, or has begun with, that another in its place would not; None if nothing."""
    if job.strategy.compression.name != "none":
        name = job.strategy.compression.name
        return f"its gradients are compressed (`{name}`), and each worker keeps what it left out"
    if job.train.randomness != "sample":
        return 'each worker draws from a generator of its own (`train.randomness = "worker"`)'
    if job.data.loaders:
        return "it has loader processes (`data.loaders`)"
    return None


def unscalable(job: Job) -> str | None:
    """Why the number of workers cannot change while a training goes on; None if it can.

    It can where workers are alike, and where islands take whole batches from servers.
    """
    exchange = job.strategy.exchange
    if not exchange.served:
        return fixed(job)
    if exchange.divided:
        return f"its islands share every global batch (the consistency is `{exchange.consistency}`)"
    return None


def elastic(job: Job) -> bool:
    """Whether workers of a training can come and go while it goes on."""
    return fixed(job) is None


def goes_on(job: Job) -> bool:
    """Whether a training goes on in the same processes when a worker is lost."""
    return elastic(job) or refills(job)


def held_together(job: Job) -> str | None:
    """Why islands that train alone do not go on without one that is lost or late; None if they do."""
    if not job.strategy.exchange.local:
        return f"its islands exchange by `{job.strategy.exchange.name}`"
    if job.strategy.islands == 1:
        return "it has one island"
    if rows_by_island(job):
        return 'each island has rows of its own (`data.placement = "island"`), which nobody else could take'
    if job.cluster.replacements == 0:
        return "no lost worker is replaced (`cluster.replacements`)"
    return _kept_by_workers(job)


def leaves_out(job: Job) -> bool:
    """Whether islands that train alone go on without one that is lost or late."""
    return held_together(job) is None


def bounds(job: Job) -> Bounds:
    """With how many workers such a training goes on."""
    cluster, world = job.cluster, job.strategy.world
    if refills(job):
        return Bounds(world, world, placed=True)
    if rows_by_island(job):  # each island has rows of its own
        return Bounds(world, world)
    size = world // job.strategy.islands if job.strategy.exchange.served else 1
    return Bounds(
        max(cluster.min_workers or 1, size), max(cluster.max_workers or world, world), cluster.min_workers is not None
    )


def check(job: Job) -> None:
    """Whether the numbers of workers that a job names fit together.

    Raises:
        InputError: naming the key.
    """
    exchange = job.strategy.exchange
    for name in ("quorum", "grace"):
        asked = getattr(exchange, name) != type(exchange).model_fields[name].default
        if asked and (why := held_together(job)) is not None:
            what = f"an island that is lost or late cannot be left out while this job is trained: {why}"
            raise InputError(what, where=f"strategy.exchange.{name}", fix=_LEAVE)
    least, most, world = job.cluster.min_workers, job.cluster.max_workers, job.strategy.world
    key = "cluster.min_workers" if least is not None else "cluster.max_workers"
    if least is None and most is None:
        return
    if (why := unscalable(job)) is not None:
        raise InputError(f"the number of workers cannot change while this job is trained: {why}", where=key, fix=_LEAVE)
    if rows_by_island(job):
        what = 'the number of workers cannot change where each island has rows of its own (`data.placement = "island"`)'
        raise InputError(what, where=key, fix=_LEAVE)
    if least is not None and least > world:
        what = f"{least} is more than the {world} workers of the strategy"
        raise InputError(what, where="cluster.min_workers", fix=f"Give at most {world}, or more workers")
    if most is not None and most < world:
        what = f"{most} is less than the {world} workers of the strategy"
        raise InputError(what, where="cluster.max_workers", fix=f"Give at least {world}, or fewer workers")


def rows_by_island(job: Job) -> bool:
    """Whether islands draw from rows of their own, so that none can be left out."""
    return job.strategy.islands > 1 and job.data.placement == "island"


def mesh_of(job: Job, place: int, members: int) -> Mesh:
    """The mesh of an era with so many members, as the one at `place` among them has it."""
    if members == job.strategy.world:
        return Mesh.of(job.strategy, place)
    return Mesh(place, data=members)
