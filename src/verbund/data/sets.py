"""The training and validation samples of a job, as a worker opens them."""

from __future__ import annotations

from pathlib import Path

from verbund.data.dataset import DatasetSource
from verbund.data.prepare import Prepared, names_of, needed
from verbund.data.samples import ColumnFiles, Samples, Source
from verbund.data.split import Selection
from verbund.errors import DataError, TaskError
from verbund.job import Data, Job
from verbund.task import Task


def open_sets(prepared: Prepared, job: Job, task: Task) -> tuple[Samples, Samples | None]:
    """The samples to train on, and those to validate with, if there are any.

    Where data are only evaluated there is no training set, and they stand for it.

    Raises:
        TaskError: if there are no data.
        DataError: if a split leaves one side empty.
    """
    data = job.data
    if prepared.train is None and prepared.validation is not None:
        only = Samples(ColumnFiles(Path(prepared.validation), needed(data, task.own), prepared.roots))
        return only, only
    if prepared.train is None:
        if task.dataset is None:
            raise TaskError("no data: neither `data.train` in the job nor `dataset()` here", where=str(task.file))
        names = [*(names_of(data.input) or ["input"]), *(names_of(data.target) or ["target"])]
        train: Source = DatasetSource(task.dataset(), names, job.seed)
        other = task.validation_dataset() if task.validation_dataset is not None else None
        validation: Source | None = DatasetSource(other, names, job.seed) if other is not None else None
    else:
        columns = needed(data, task.own)
        train = ColumnFiles(Path(prepared.train), columns, prepared.roots)
        validation = None
        if prepared.validation:
            validation = ColumnFiles(Path(prepared.validation), columns, prepared.roots)
    if validation is None and data.validation_fraction > 0:
        return _split(train, data, job.seed)
    return Samples(train), Samples(validation) if validation is not None else None


def _split(source: Source, data: Data, seed: int) -> tuple[Samples, Samples]:
    sides = [Selection(source.size, data.validation_fraction, seed, validation=side) for side in (False, True)]
    for side, name in zip(sides, ("train on", "validate with"), strict=True):
        if not len(side):
            raise DataError(
                f"of {source.size} samples none is left to {name}",
                where="data.validation_fraction",
                fix="Change it",
            )
    train, validation = sides
    return Samples(source, train), Samples(source, validation)
