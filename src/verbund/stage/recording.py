"""The journal of a process of a run."""

from __future__ import annotations

from verbund.cluster.worker import Worker
from verbund.job import Job
from verbund.observe.events import Journal
from verbund.observe.garbage import record_pauses
from verbund.run import Run


def journal_of(worker: Worker, run: Run, job: Job) -> Journal:
    """A file of the process's own: by its role, rank, generation, and who had its place before."""
    spec = worker.spec
    journal = Journal(
        run.journal,
        spec.role,
        spec.rank,
        spec.generation,
        limit_mb=job.observe.journal_mb,
        address=spec.address,
        life=spec.life,
    )
    record_pauses(journal)
    return journal
