"""Which trainings whose mesh divides the model go on, after a loss, with another process in the lost one's place."""

from __future__ import annotations

from verbund.job import Job

_MIRROR_EVERY = 10
"""Steps between two mirrors where nobody says: copying is a hundredth of them with large models, and redoing half of
them takes less than starting anew."""


def refills(job: Job) -> bool:
    """Whether the others keep what they have trained, and the lost worker's place is filled from memory.

    Each worker must come to the same numbers in any process: what it keeps besides the model must be a function of the
    step.
    """
    strategy = job.strategy
    return (
        any(strategy.mesh.get(axis, 1) > 1 for axis in ("shard", "tensor", "pipeline"))
        and job.cluster.replacements > 0
        and strategy.exchange.name == "all_reduce"
        and strategy.compression.name == "none"
        and job.train.randomness == "sample"
        and job.data.loaders == 0
        and (_peers(job) > 1 or _every(job) > 0)
    )


def mirror_every(job: Job) -> int:
    """Steps between two mirrors; 0: none."""
    return _every(job) if refills(job) else 0


def _every(job: Job) -> int:
    if job.checkpoint.mirror == "auto":
        return _MIRROR_EVERY if _peers(job) == 1 else 0
    return job.checkpoint.mirror


def _peers(job: Job) -> int:
    """How many workers hold the same."""
    return job.strategy.mesh.get("data", 1) * job.strategy.islands
