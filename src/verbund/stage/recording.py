"""The journal of a process of a run, and the totals that all of them record."""

from __future__ import annotations

from verbund.cluster.worker import Worker
from verbund.job import Job
from verbund.observe.events import Journal
from verbund.observe.garbage import record_pauses
from verbund.observe.memory import peak_bytes
from verbund.observe.network import Links
from verbund.run import JOURNAL


def journal_of(worker: Worker, job: Job) -> Journal:
    """A file of the process's own: by its role, rank, generation, and who had its place before."""
    spec = worker.spec
    journal = Journal(
        worker.location(worker.settings["run"]) / JOURNAL,
        spec.role,
        spec.rank,
        spec.generation,
        limit_mb=job.observe.journal_mb,
        address=spec.address,
        life=spec.life,
    )
    record_pauses(journal)
    return journal


def count(journal: Journal, links: Links, shared: int = 0) -> None:
    """Records the running totals of bytes moved and memory.

    Args:
        journal: the process's own.
        links: its connections.
        shared: bytes that it has handed over through shared memory.
    """
    journal.totals("links", links=links.sample(), wire=links.wire(), shared=shared)
    journal.totals("memory", peak=peak_bytes())
