"""Preparing a job's data before any worker starts: find it, convert it once. Never imports torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verbund.data.convert import convert
from verbund.data.finding import find
from verbund.data.manifest import Manifest
from verbund.errors import DataError
from verbund.job import Data

Notify = Callable[[str], None]


@dataclass(frozen=True)
class Prepared:
    """Where the converted data lies; None where the task file brings its own."""

    train: str | None
    validation: str | None
    key: str = "data.validation"
    """What messages call the validation set."""

    def record(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)

    @staticmethod
    def from_record(record: dict[str, Any]) -> Prepared:
        """What `record` described."""
        return Prepared(**record)


def cache_of(data: Data) -> Path:
    """The folder of converted data."""
    if data.cache is not None:
        return Path(data.cache).expanduser()
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


def names_of(value: str | list[str] | None) -> list[str]:
    """One name, several or none, as a list."""
    return [value] if isinstance(value, str) else list(value or [])
