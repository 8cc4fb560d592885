"""The model of a task without values, and the values it begins with: those of its constructor or of its files."""

from __future__ import annotations

from torch import Tensor

from verbund.mesh.initial.record import Recorded, record
from verbund.mesh.initial.seeds import seed_everything
from verbund.mesh.initial.tape import NotRecordable
from verbund.task import Task


def record_task(task: Task, seed: int) -> Recorded:
    """The model without values.

    Raises:
        NotRecordable: if its constructor needs them, or its files have none for some parameter.
    """
    if task.saved is None:
        return record(task.build, seed)
    recorded = record(task.saved.bare, seed)
    for name, _ in recorded.model.named_parameters():
        if name not in task.saved.names:
            raise NotRecordable(f"`{name}` is not in the model's files under this name")
    return recorded


def recorded_task(task: Task, seed: int) -> Recorded | None:
    """The same; None, with the generators as they were, if it has to be built with values."""
    try:
        return record_task(task, seed)
    except NotRecordable:
        seed_everything(seed)
        return None


def first_values(task: Task, name: str, values: Tensor) -> Tensor:
    """The first values of a parameter or buffer: the saved ones, if there are any."""
    if task.saved is None or name not in task.saved.names:
        return values
    return task.saved.read(name).to(values.dtype)
