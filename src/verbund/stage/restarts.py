"""Restarts: where processes were lost or had to go, training begins again from the newest checkpoint, in the same
command."""

from __future__ import annotations

from pathlib import Path

from verbund import checkpoint
from verbund.cluster.process import Cluster
from verbund.cluster.replacements import Budget
from verbund.data.prepare import Prepared
from verbund.errors import ClusterLost, Interrupted
from verbund.interrupts import Interrupt, Interrupts
from verbund.job import Job
from verbund.run import Run
from verbund.stage.attempt import Preempted, attempt
from verbund.stage.before import Facts

_IN_VAIN = 3
"""Restarts in a row that came to no newer checkpoint, after which another one would not either."""


def persistent(
    cluster: Cluster,
    run: Run,
    job: Job,
    prepared: Prepared,
    facts: Facts,
    source: Path | None,
    quiet: bool,
    interrupts: Interrupts,
    warnings: list[str] | None = None,
) -> Run:
    """An attempt, and after a loss of processes the next one, as long as `cluster.replacements` lasts.

    Where lost processes can be replaced while the others go on, that comes first. What ends a run with parameter
    servers ends it.

    Raises:
        VerbundError: as `attempt`; of a loss the last one, with how many there were before.
    """
    budget = Budget(job.cluster.replacements, job.cluster.replacement_window)
    in_vain = 0
    while True:
        try:
            there = _settled(cluster, job, run)
            return attempt(cluster, run, there, prepared, facts, source, quiet, interrupts, budget, warnings)
        except ClusterLost as error:
            ended = job.strategy.exchange.served or interrupts.count or cluster.lost is not None
            if ended or not (isinstance(error, Preempted) or budget.take()):
                raise
            former = source
            source, warnings = newest(run)
            in_vain = in_vain + 1 if source == former else 0
            if in_vain >= _IN_VAIN:
                raise
            where = f"step {checkpoint.Manifest.open(source, verify=False).step}" if source is not None else "the start"
            warnings = [f"{error.what}: training goes on from {where}", *(warnings if source is not None else [])]


def _settled(cluster: Cluster, job: Job, run: Run) -> Job:
    """The job on the hosts that there are; the wait for others in the place of lost ones may be interrupted."""
    try:
        with Interrupts(ending=True):
            return cluster.settled(job)
    except Interrupt:
        fix = f"`verbund resume {run.path}` continues from the last checkpoint"
        raise Interrupted("interrupted while it waited for hosts", where=str(run.path), fix=fix) from None


def newest(run: Run) -> tuple[Path | None, list[str]]:
    """The newest valid checkpoint, and warnings about those that are not; None if nothing was saved."""
    if not any(run.checkpoints.glob("step-*")):
        return None, ["no checkpoint was saved: the run starts anew"]
    return checkpoint.newest_valid(run.checkpoints)
