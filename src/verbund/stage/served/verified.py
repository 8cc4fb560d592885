"""Verification with real parameter servers: a short run, of which each step is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verbund.cluster.process import Cluster
from verbund.cluster.replacements import Budget
from verbund.data.prepare import Prepared
from verbund.interrupts import Interrupts
from verbund.job import Job
from verbund.run import Run
from verbund.stage.attempt import attempt
from verbund.stage.before import Facts

KINDS = ["parameters", "buffers"]
"""What there is to compare: gradients lie on no server."""


def exact(job: Job) -> bool:
    """Whether servers take the steps of a single process."""
    exchange = job.strategy.exchange
    return exchange.served and exchange.consistency == "bulk_synchronous" and not exchange.backup


def settings(steps: int) -> dict[str, Any]:
    """What such a run has in place of a job's own settings: so many steps, each saved, and no other ending."""
    return {
        "train.epochs": None,
        "train.seconds": None,
        "train.target": None,
        "train.patience": None,
        "validate.every": "end",
        "checkpoint.every": 1,
        "checkpoint.keep": steps + 1,
        "checkpoint.disk_budget_mb": None,
        "strategy.exchange.compression": "none",
    }


def run(cluster: Cluster, job: Job, prepared: Prepared, facts: Facts, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Trains; `job` has these settings.

    Args:
        cluster: where.
        job: what.
        prepared: its data.
        facts: of its dry run.
        folder: for the run; must not exist.

    Returns:
        Where the checkpoints of all steps lie, and `losses` by step.

    Raises:
        VerbundError: as any training; nothing that is lost is replaced.
    """
    made = Run.create(folder, job)
    with Interrupts() as interrupts:
        attempt(cluster, made, job, prepared, facts, None, True, interrupts, Budget(0, 1.0))
    losses = [loss for _, loss in made.summary["loss"]["curve"]]
    return made.checkpoints, {"losses": losses, "fused": {}, "tensor_bytes": {}}
