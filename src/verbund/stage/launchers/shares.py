"""How a job's workers are shared among machines that a scheduler will give."""

from __future__ import annotations

from pathlib import Path

from verbund.errors import InputError
from verbund.job import Job


def slots_of(job: Job, nodes: int) -> int:
    """The workers that each of so many machines takes.

    Raises:
        InputError: if there are more machines than workers, or the job could not run over so many.
    """
    if nodes < 1:
        raise InputError("at least 1 node is needed", where="--nodes")
    if nodes > job.world:
        fix = "Give fewer nodes, or a larger strategy (`--workers`, `--strategy`)"
        raise InputError(f"{nodes} nodes for {job.world} workers", where="--nodes", fix=fix)
    slots = -(-job.world // nodes)
    # What would be said when the machines have come, in the queue's own time, is said now.
    there = {"kind": "external", "hosts": [f"node{number}" for number in range(nodes)], "slots": [slots] * nodes}
    Job.build(
        job.resolved(),
        {f"cluster.{key}": value for key, value in there.items()},
        source="job",
        folder=Path(job.folder),
    )
    return slots
