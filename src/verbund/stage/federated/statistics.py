"""A client's answer to what its server asks of its columns."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verbund.data.manifest import Manifest
from verbund.data.samples import ColumnFiles
from verbund.errors import DataError
from verbund.exchange.federated.policy import Policy
from verbund.exchange.federated.statistics import noise_of, noisy, permitted, summed, withheld
from verbund.job import Job

_READ = 1 << 16


def answer(job: Job, table: Path | None, policy: Policy) -> dict[str, Any]:
    """What is told: `columns` by name, None for those of too few samples; or `declined`, why nothing is.

    Args:
        job: what is asked.
        table: the owner's samples; None if they lie in no table.
        policy: what the owner permits.

    Raises:
        DataError: if a column is not there, or is none of single numbers.
    """
    asked = job.strategy.exchange.statistics
    if not permitted(list(asked), policy.statistics):
        return {"declined": "policy, statistics"}
    if table is None:
        raise DataError("the samples lie in no table whose columns could be summed up", where="--data")
    known = {column.name: column for column in Manifest.read(table).columns}
    for name in asked:
        column = known.get(name)
        size = int(np.prod(column.shape)) if column is not None and column.file is not None else 0
        if column is None or size != 1 or column.vocabulary is not None:
            what = "is not there" if column is None else "is not a column of single numbers"
            raise DataError(f"`{name}`, which the server asks statistics of, {what}", where=f"--data, {job.data.train}")
    epsilon = policy.statistics_epsilon
    noise = noise_of(epsilon, policy.delta, len(asked)) if epsilon is not None else None
    found = {}
    for name, column_asked in asked.items():
        told = summed(_parts(table, name), column_asked, bounded=noise is not None)
        if noise is not None:
            told = noisy(told, column_asked, noise)
        found[name] = withheld(told, policy.statistics_minimum)
    return {"columns": found, "noise": noise}


def _parts(table: Path, name: str) -> Iterator[NDArray[Any]]:
    source = ColumnFiles(table, [name])
    for low in range(0, source.size, _READ):
        ids = np.arange(low, min(low + _READ, source.size), dtype=np.int64)
        yield source.rows(ids)[name].reshape(len(ids))
