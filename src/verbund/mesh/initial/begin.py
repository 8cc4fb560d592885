"""The model as a worker begins with it: built, or without values where its parts are filled in one by one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from verbund.job import Job
from verbund.mesh import optimizer
from verbund.mesh.forward import Tables
from verbund.mesh.initial.of_task import recorded_task
from verbund.mesh.initial.record import Recorded
from verbund.mesh.initial.seeds import seed_everything
from verbund.tables import bare
from verbund.task import Task


@dataclass(frozen=True)
class Begun:
    """A model before it is divided.

    Args:
        model: on the device that trains it, or without values.
        recorded: what can fill the parts of a model without values; None: it has them, or needs none.
        tables: those that were taken out of it.
    """

    model: nn.Module
    recorded: Recorded | None
    tables: Tables | None


def begin(
    task: Task,
    job: Job,
    device: torch.device,
    deferred: bool,
    unbuilt: nn.Module | None,
    take_tables: Callable[[nn.Module], Tables] | None,
) -> Begun:
    """Seeds all generators and builds the task's model.

    Args:
        task: the user's functions.
        job: the whole job.
        device: that trains.
        deferred: build it without values, if its constructor allows it.
        unbuilt: the model without values, where it is only to be looked at.
        take_tables: takes the embedding tables out of it, where they lie elsewhere.
    """
    seed_everything(job.seed)
    if not job.train.compile:
        optimizer.without_dynamo()
    recorded = recorded_task(task, job.seed) if deferred else None
    model = unbuilt
    if model is None:
        with bare() if take_tables is not None else nullcontext():
            model = recorded.model if recorded is not None else task.build()
    tables = take_tables(model) if take_tables is not None else None
    if recorded is None and unbuilt is None:
        model = model.to(device)  # without the tables, which may have no memory
    return Begun(model, recorded, tables)
