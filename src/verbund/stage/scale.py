"""Changing the number of workers of a training that goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verbund.cluster import requests
from verbund.comm.wire import Deadline, WireError
from verbund.errors import ClusterLost, InputError
from verbund.run import Run
from verbund.stage.elastic import bounds, rows_by_island, unscalable


def scale(directory: Path | str, workers: int) -> dict[str, Any]:
    """Changes the number of workers of a run that another process trains; returns when that many train.

    Where workers are alike the numbers stay those of any other count; asynchronous islands come and go by whole
    batches.
    The run's job stays as it is: a resume has its number.

    Args:
        directory: the run.
        workers: how many there are to be, islands and their axis `data` together.

    Returns:
        `former` and `workers`, counts, and the `seconds` that it took.

    Raises:
        InputError: if the run is not being trained, or cannot have so many.
        ClusterLost: if it ended meanwhile, or takes longer than steps may.
    """
    run = Run.open(Path(directory))
    job = run.job
    where = str(run.path)
    resumed = f"Ctrl-C saves it; `verbund resume {run.path} --workers {workers}` goes on"
    if not run.being_trained:
        fix = f"`verbund resume {run.path} --workers {workers}` goes on with so many"
        raise InputError("the run is not being trained", where=where, fix=fix)
    if (why := unscalable(job)) is not None:
        what = f"the number of workers cannot change while this run is trained: {why}"
        raise InputError(what, where=where, fix=resumed)
    limits = bounds(job)
    if rows_by_island(job):
        what = 'the number of workers cannot change while this run is trained: with `data.placement = "island"` each '
        raise InputError(f"{what}island has rows of its own", where=where, fix=resumed)
    if not limits.least <= workers <= limits.most:
        key = "min" if workers < limits.least else "max"
        what = f"{workers} workers are asked for, and this run takes {limits.least} to {limits.most}"
        limit = f"`cluster.{key}_workers` sets the limit when it is started or resumed"
        raise InputError(what, where="arguments", fix=limit if workers > 0 else None)
    size = 1 if not job.strategy.exchange.served else job.world // job.strategy.islands
    if workers % size:
        what = f"{workers} workers are asked for, and each island of this run has {size}"
        raise InputError(what, where="arguments", fix=f"Give a multiple of {size}")
    deadline = 2 * job.cluster.step_deadline + job.cluster.lost_after
    try:
        answer = requests.ask(run.requests, workers, deadline)
    except Deadline:
        raise ClusterLost(f"there are not {workers} workers after {deadline:.0f} s", where=where) from None
    except WireError as error:
        what = f"the run takes no requests: {error}"
        raise ClusterLost(what, where=where, fix="It may just begin or end; try again") from None
    if (why := answer.get("refused")) is not None:
        raise ClusterLost(f"there are not {workers} workers: {why}", where=where)
    return answer
