"""Preparing a job's data before any worker starts: find, convert once, check the columns. Never imports torch."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verbund.data.convert import convert
from verbund.data.finding import find
from verbund.data.manifest import Column, Manifest
from verbund.errors import DataError, Problem, nearest
from verbund.job import Data

Notify = Callable[[str], None]


@dataclass(frozen=True)
class Prepared:
    """Where the converted data lies; None where the task file brings its own."""

    train: str | None
    validation: str | None

    def record(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_record(record: dict[str, Any]) -> Prepared:
        return Prepared(record["train"], record["validation"])


def cache_of(data: Data) -> Path:
    """The folder of converted data."""
    return Path(data.cache).expanduser() if data.cache is not None else default_cache()


def default_cache() -> Path:
    """The folder of converted data of jobs that name none."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "verbund"


def prepare(data: Data, *, folder: Path, notify: Notify | None = None, training: bool = True) -> Prepared:
    """Finds and converts a job's sources; what was converted before is taken from the cache.

    Args:
        data: the job's section.
        folder: what relative paths start from.
        notify: is told what takes time.
        training: False if only the validation set will be read; the training set still says what its types are.

    Raises:
        DataError: if a source is missing, unreadable or empty, or the validation set does not fit the training set.
    """
    cache = (folder / cache_of(data)).resolve()
    if data.train is None:
        if data.validation is not None and training:
            raise DataError("`data.validation` needs `data.train`", where="data", fix="Or write `validation_dataset()`")
        return Prepared(None, None)
    say = notify or (lambda _: None)
    say(f"reading {data.train}")
    train = convert(find(data.train, folder), data, folder, cache, notify=say)
    if data.validation is None:
        return Prepared(str(train), None)
    say(f"reading {data.validation}")
    validation = convert(find(data.validation, folder, "data.validation"), data, folder, cache, like=train, notify=say)
    kinds = Manifest.read(train).kind, Manifest.read(validation).kind
    if kinds[0] != kinds[1]:
        raise DataError(
            f"is a set of {kinds[1]}, the training set one of {kinds[0]}",
            where=f"data.validation, {data.validation}",
            fix="Give both in the same form",
        )
    return Prepared(str(train), str(validation))


def check_columns(
    prepared: Prepared, data: Data, objective: str | None, *, training: bool = True, ignore_index: int = -100
) -> list[Problem]:
    """All that is wrong with the columns that the job names.

    Args:
        prepared: the converted data.
        data: the job's section.
        objective: the loss by name, if it has one; it says what targets may be.
        training: False: only the validation set is looked at.
        ignore_index: the class that cross_entropy leaves out, the only one that may be negative.
    """
    problems: list[Problem] = []
    sides = [("data.train", prepared.train)] if training else []
    sides.append(("data.validation", prepared.validation))
    for key, store in sides:
        if store is not None:
            problems += _check(Manifest.read(Path(store)), key, data, objective, ignore_index)
    if not names_of(data.input) and not names_of(data.target) and training:
        problems += _lost(prepared)
    return list(dict.fromkeys(problems))


def _lost(prepared: Prepared) -> list[Problem]:
    """Columns of the training set that the validation set lacks: the task's own functions may use any."""
    if prepared.train is None or prepared.validation is None:
        return []
    train, validation = Manifest.read(Path(prepared.train)), Manifest.read(Path(prepared.validation))
    lost = [name for name in train.names if name not in validation.names]
    return [_missing(validation, "data.validation", "data.validation", name) for name in lost]


def _check(manifest: Manifest, key: str, data: Data, objective: str | None, ignore_index: int) -> list[Problem]:
    problems = []
    for name in names_of(data.input):
        column = manifest.column(name)
        if column is None:
            problems.append(_missing(manifest, key, "data.input", name))
        elif column.kind == "text":
            problems.append(
                Problem(
                    "data.input",
                    f"`{name}` is text, of which a model can only take codes",
                    "Leave it out of `input` and use its codes in the task's `inputs(batch)`",
                )
            )
        elif column.missing and column.dtype.startswith(("int", "uint", "bool")):
            problems.append(_gap(manifest, "data.input", column, "no value"))
    for name in data.scale:
        if name not in names_of(data.input):
            fix = nearest(name, names_of(data.input)) if names_of(data.input) else None
            problems.append(Problem("data.scale", f"`{name}` is no column of `data.input`", fix))
    for name in names_of(data.target):
        column = manifest.column(name)
        if column is None:
            problems.append(_missing(manifest, key, "data.target", name))
        else:
            problems += _check_target(manifest, column, objective, ignore_index)
    return problems


def _check_target(manifest: Manifest, column: Column, objective: str | None, ignore_index: int) -> list[Problem]:
    name = column.name
    if column.missing:
        gap = "NaN or no value" if column.dtype.startswith("float") else "no value"
        return [_gap(manifest, "data.target", column, gap)]
    if column.unknown and column.first_unknown is not None:
        place = manifest.place(column.first_unknown)
        return [Problem(f"data.target, {place}", f"`{name}` has a text that the training set does not have")]
    low, high = column.minimum, column.maximum
    if low is None or high is None:
        return []
    for value, row in ((low, column.minimum_row), (high, column.maximum_row)):
        if not math.isfinite(value) and row is not None:
            return [Problem(f"data.target, {manifest.place(row)}", f"`{name}` is {value}", "Leave such rows out")]
    if objective == "cross_entropy" and not (column.dtype.startswith("float") and column.shape):
        if column.first_fraction is not None:
            place = manifest.place(column.first_fraction)
            return [
                Problem(
                    f"data.target, {place}",
                    f"`{name}` is not a whole number, so it names no class",
                    "Use the objective mean_squared_error for numbers",
                )
            ]
        if low < 0 and column.minimum_row is not None and low != ignore_index:
            return [Problem(f"data.target, {manifest.place(column.minimum_row)}", f"`{name}` is {low}, below class 0")]
    if objective == "binary_cross_entropy" and (low < 0 or high > 1):
        row = column.minimum_row if low < 0 else column.maximum_row
        value = low if low < 0 else high
        place = manifest.place(row) if row is not None else ""
        return [Problem(f"data.target, {place}", f"`{name}` is {value}; binary targets lie between 0 and 1")]
    return []


def _gap(manifest: Manifest, key: str, column: Column, what: str) -> Problem:
    assert column.first_missing is not None
    rows = f"{column.missing} rows have" if column.missing > 1 else "1 row has"
    return Problem(
        f"{key}, {manifest.place(column.first_missing)}",
        f"{rows} {what} in `{column.name}`, this one first",
        "Fill them or leave these rows out",
    )


def _missing(manifest: Manifest, key: str, setting: str, name: str) -> Problem:
    if (reason := manifest.unsupported.get(name)) is not None:
        return Problem(setting, f"column `{name}` of {key} cannot be used: {reason}")
    return Problem(setting, f"{key} has no column `{name}`", nearest(name, manifest.names))


def names_of(value: str | list[str] | None) -> list[str]:
    """One name, several or none, as a list."""
    return [value] if isinstance(value, str) else list(value or [])
