"""Which trainings can have lost workers replaced."""

from __future__ import annotations

from verbund.job import Job


def elastic(job: Job) -> bool:
    """Whether a lost worker's place can be taken by another process that gets all it needs from its peers' memory."""
    strategy = job.strategy
    divides = any(strategy.mesh.get(axis, 1) > 1 for axis in ("shard", "tensor", "pipeline"))
    return (
        not divides
        and strategy.world > 1
        and job.cluster.replacements > 0
        and strategy.exchange.name == "all_reduce"
        and strategy.compression.name == "none"
        and job.train.randomness == "sample"
        and job.train.batch_norm != "global"
        and job.data.loaders == 0
    )
