"""The collectives of a validation are in the journals: who waited for whom, as in training."""

from __future__ import annotations

from collections.abc import Callable

from conftest import MLP
from verbund.observe.journal import read
from verbund.observe.timeline import merge
from verbund.run import Run

# Worker 0 gets the first of two evaluation batches, and takes its time.
SLOW = (
    MLP
    + """
import time, torch

def metrics(output, targets):
    from verbund.sums import Sums
    if len(targets) == 20:
        time.sleep(0.4)
    return {"zero": Sums(torch.zeros(len(targets)), torch.ones(len(targets)))}
"""
)


def test_waiting_and_communicating(run_job: Callable[..., Run]) -> None:
    changes = {"strategy.mesh": {"data": 2}, "data.validation_fraction": 0.2, "validate.every": 2, "validate.batch": 20}
    run = run_job(SLOW, {**changes, "train.steps": 4, "train.check_replicas": 2}, rows=170)
    workers = [journal for journal in read(run.journal) if journal.role == "worker"]
    for journal in workers:
        rows = journal.collectives
        assert sorted(rows[rows[:, 1] >= 1 << 20, 0].tolist()) == [2, 2, 4, 4]
    timeline = merge(workers)
    assert timeline.unsplit == 0
    waits = {life.who[1]: life.seconds["wait"] for life in timeline.lives}
    assert waits[1] > 0.7 > 0.4 > waits[0]
    assert timeline.caused[0, 0] > 0.7
