"""What workers do whose command is gone: together they save the step that they have come to, and end; a resume goes on
from there.

Nobody goes on with the run meanwhile: each worker holds a shared lock on a file of the run's folder as long as it
lives, and who resumes waits for all of them.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from verbund import checkpoint
from verbund.cluster.worker import Worker
from verbund.errors import VerbundError
from verbund.observe.events import Journal
from verbund.run import attend
from verbund.stage.island import Island
from verbund.stage.saving import Saver

_WHAT = "the save of workers without a command"


def hold(worker: Worker) -> None:
    """Has a resume of the run wait for this process. Not before `Worker.supervise`."""
    run = worker.location(worker.settings["run"])
    if isinstance(run, Path):
        attend(run)


def commit(worker: Worker, island: Island, saver: Saver, journal: Journal) -> None:
    """Makes a checkpoint of what all have just saved, if the one who does that else is gone. All workers call it.

    Args:
        worker: this one.
        island: this worker's, which trains in step with all others.
        saver: which has written this worker's part.
        journal: is told.

    Raises:
        PeerLost: if a worker is lost meanwhile.
    """
    gather = island.groups.gather
    if not any(each["gone"].any() for each in gather({"gone": np.array([worker.orphaned])}, _WHAT)):
        return
    raw = np.frombuffer(json.dumps(saver.written).encode(), np.uint8)
    parts: list[dict[str, Any]] = [json.loads(each["part"].tobytes()) for each in gather({"part": raw}, _WHAT)]
    checkpoints, (first, *_) = saver.checkpoints, parts
    if island.mesh.rank != 0 or not isinstance(checkpoints, Path):
        return
    start, step = time.monotonic(), int(first["step"])
    if not checkpoint.is_partial(checkpoints, step):  # it was the last that the command did
        return
    failure = next((str(part["failure"]) for part in parts if part["failure"] is not None), None)
    try:
        if failure is None:
            checkpoint.commit(checkpoints, step, [part["record"] for part in parts], first["state"])
    except (OSError, VerbundError) as error:
        failure = str(error)
    if failure is not None:
        checkpoint.discard(checkpoints, step)
        journal.event("checkpoint_failed", step=step, failure=failure)
        return
    size = sum(int(file["bytes"]) for part in parts for file in part["record"].get("files", []))
    journal.event("checkpoint", step=step, seconds=round(time.monotonic() - start, 4), bytes=size, orphaned=True)
