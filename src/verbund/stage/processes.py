"""Processes of a stage, watched until they end."""

from __future__ import annotations

from typing import Any

from verbund.cluster.process import Cluster, ProcessSpec
from verbund.cluster.supervisor import Failed, Supervisor
from verbund.errors import Interrupted, VerbundError
from verbund.interrupts import Interrupt
from verbund.job import Job


def supervised(cluster: Cluster, job: Job, specs: list[ProcessSpec]) -> list[dict[str, Any]]:
    """The results of processes that are watched until they end."""
    supervisor = Supervisor(cluster, job.cluster, lambda *_: None)
    try:
        results = supervisor.run(specs)
    except Failed as failed:
        raise with_trace(failed) from None
    except (Interrupt, KeyboardInterrupt):
        raise Interrupted("interrupted: nothing was written") from None
    return results


def workers(job: Job, entry: str, settings: dict[str, Any], generation: int = 1) -> list[ProcessSpec]:
    return [ProcessSpec("worker", rank, job.world, entry, generation, settings) for rank in range(job.world)]


def with_trace(failed: Failed) -> VerbundError:
    error = failed.error
    error.trace = failed.failures[0].trace
    return error
