"""The partition of a job's samples among the clients of a simulation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verbund.data.manifest import Manifest
from verbund.data.prepare import names_of
from verbund.data.samples import ColumnFiles, Samples
from verbund.errors import InputError, nearest
from verbund.exchange.federated.partition import BY_LABEL, Parts, alike, divide
from verbund.job import Job

_WHERE = "strategy.exchange.partition.column"
_READ = 4096


def parts_of(job: Job, samples: Samples, store: str | None) -> Parts:
    """Which client has which samples: a function of the job and the data.

    Args:
        job: partition, clients, seed.
        samples: that are divided.
        store: the folder that they lie in, if there is one.

    Raises:
        InputError: if they cannot be divided so.
    """
    exchange = job.strategy.exchange
    values = None
    if exchange.partition.name in (*BY_LABEL, "column"):
        values = _values(job, samples, store)
    return divide(exchange.partition, exchange.clients, job.seed, len(samples), values)


def parts_alike(
    job: Job, parts: Parts, samples: Samples, store: str | None, others: Samples, theirs: str | None
) -> Parts:
    """Which client has which of other samples, so that they are like its own; see `alike`.

    Args:
        job: the partition.
        parts: who has which samples.
        samples: these.
        store: the folder that they lie in, if there is one.
        others: those to be divided.
        theirs: the folder that those lie in.
    """
    if job.strategy.exchange.partition.name in (*BY_LABEL, "column"):
        return alike(parts, _values(job, samples, store), _values(job, others, theirs), job.seed)
    return alike(parts, np.zeros(len(samples)), np.zeros(len(others)), job.seed)


def _values(job: Job, samples: Samples, store: str | None) -> NDArray[Any]:
    """The column that samples are divided by, [samples]."""
    partition = job.strategy.exchange.partition
    targets = names_of(job.data.target) or ["target"]
    name = partition.column or targets[0]
    positions = np.arange(len(samples))
    if store is not None:
        known = Manifest.read(Path(store)).names
        if name not in known:
            raise InputError(f"the data has no column `{name}`", where=_WHERE, fix=nearest(name, known))
        values = ColumnFiles(Path(store), [name]).rows(samples.ids(positions))[name]
    else:
        read = []
        for low in range(0, len(positions), _READ):
            rows = samples.source.rows(samples.ids(positions[low : low + _READ]))
            if name not in rows:
                raise InputError(f"the data has no column `{name}`", where=_WHERE, fix=nearest(name, list(rows)))
            read.append(rows[name])
        values = np.concatenate(read)
    values = values.reshape(len(values), -1)
    if values.shape[1] != 1:
        raise InputError(
            f"`{name}` has {values.shape[1]} values a sample, and one is needed to divide by",
            where=_WHERE,
            fix="Name another column",
        )
    return values[:, 0]
