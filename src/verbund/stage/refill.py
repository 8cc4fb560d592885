"""Which trainings whose mesh divides the model go on, after a loss, with another process in the lost one's place."""

from __future__ import annotations

from verbund.job import AXES, Job
from verbund.mesh.axes import Mesh

_MIRROR_EVERY = 10
"""Steps between two mirrors where nobody says: copying is a hundredth of them with large models, and redoing half of
them takes less than starting anew."""
MIRRORS = 2
"""Of each worker: while one is written the other is whole."""


def refills(job: Job) -> bool:
    """Whether the others keep what they have trained, and the lost worker's place is filled from memory."""
    return obstacle(job) is None


def obstacle(job: Job) -> str | None:
    """Why not, if so.

    Each worker must come to the same numbers in any process: what it keeps besides the model must be a function of the
    step.
    """
    strategy = job.strategy
    if not any(strategy.mesh.get(axis, 1) > 1 for axis in ("shard", "tensor", "pipeline")):
        return "the mesh does not divide the model"
    if strategy.exchange.name != "all_reduce":
        return f"islands exchange by `{strategy.exchange.name}`"
    if strategy.compression.name != "none":
        return f"gradients are compressed (`{strategy.compression.name}`), and each worker keeps what it left out"
    if job.train.randomness != "sample":
        return 'each worker draws from a generator of its own (`train.randomness = "worker"`)'
    if job.data.loaders:
        return "there are loader processes (`data.loaders`)"
    if job.cluster.replacements == 0:
        return "no lost worker is replaced (`cluster.replacements`)"
    if _peers(job) == 1 and not _every(job):
        return "nobody else holds what a worker holds"
    return None


def note(job: Job) -> str | None:
    """That mirrors were asked for and there are none, if so."""
    reason = obstacle(job)
    asked = job.checkpoint.mirror != "auto" and job.checkpoint.mirror > 0
    return f"checkpoint.mirror = {job.checkpoint.mirror} makes no mirrors: {reason}" if asked and reason else None


def mirror_every(job: Job) -> int:
    """Steps between two mirrors; 0: none."""
    return _every(job) if refills(job) else 0


def mirrors_kept(job: Job, mesh: Mesh) -> int:
    """How many mirrors a worker has in memory, each as large as what it holds: two of its own, and where workers are
    alone on their hosts two of another's; 0: none.

    Args:
        job: its settings.
        mesh: the axes, instead of the job's.
    """
    axes = {axis: mesh.size(axis) for axis in AXES}
    tried = job.model_copy(update={"strategy": job.strategy.model_copy(update={"mesh": axes})})
    if not mirror_every(tried):
        return 0
    return 2 * MIRRORS if job.cluster.spread and tried.neighbours == 1 else MIRRORS


def _every(job: Job) -> int:
    if job.checkpoint.mirror == "auto":
        return _MIRROR_EVERY if _peers(job) == 1 else 0
    return job.checkpoint.mirror


def _peers(job: Job) -> int:
    """How many workers hold the same."""
    return job.strategy.mesh.get("data", 1) * job.strategy.islands
