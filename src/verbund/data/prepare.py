"""Preparing a job's data before any worker starts: find it, convert it once. Never imports torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from verbund.data.convert import convert
from verbund.data.finding import Found, find
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
    notes: list[str] = field(default_factory=list)
    """What the user should know about how the sources were read."""
    roots: dict[str, str] = field(default_factory=dict)
    """Where the images lie of folders that this host does not see."""

    def record(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)

    @staticmethod
    def from_record(record: dict[str, Any]) -> Prepared:
        """What `record` described."""
        return Prepared(**record)


def cache_of(data: Data) -> Path:
    """The folder of converted data."""
    return Path(data.cache).expanduser() if data.cache is not None else default_cache()


def default_cache() -> Path:
    """The folder of converted data of jobs that name none."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "verbund"


@dataclass(frozen=True)
class Evaluated:
    """What is evaluated instead of a job's own validation set.

    Args:
        source: file, folder, glob, manifest or `sklearn:NAME`.
        key: the argument that named it.
        labelled: whether it must have targets.
    """

    source: str
    key: str
    labelled: bool = True


def prepare(data: Data, *, folder: Path, notify: Notify | None = None, schema: Path | None = None) -> Prepared:
    """Finds and converts a job's sources; what was converted before is taken from the cache.

    Args:
        data: the job's section.
        folder: what relative paths start from.
        notify: is told what takes time.
        schema: what a run keeps of its training set. If that has changed since, its types and vocabularies are as
            they were.

    Raises:
        DataError: if a source is missing, unreadable or empty, or the validation set does not fit the training set.
    """
    cache = (folder / cache_of(data)).resolve()
    if data.train is None:
        if data.validation is not None:
            raise DataError("`data.validation` needs `data.train`", where="data", fix="Or write `validation_dataset()`")
        return Prepared(None, None)
    say = notify or (lambda _: None)
    say(f"reading {data.train}")
    found = find(data.train, folder)
    notes = [*_left_out(found)]
    train = convert(found, data, folder, cache, notify=say)
    if schema is not None and _fingerprint(train) != _fingerprint(schema) and found.kind != "manifest":
        notes.append(f"{data.train} has changed since the run began; its classes and texts keep their numbers")
        train = convert(found, data, folder, cache, like=schema, notify=say)
    if data.validation is None:
        return Prepared(str(train), None, notes=notes)
    evaluated = Evaluated(data.validation, "data.validation")
    validation, more = _evaluated(evaluated, data, folder, cache, schema or train, say)
    return Prepared(str(train), str(validation), notes=notes + more)


def prepare_evaluated(
    evaluated: Evaluated, data: Data, *, folder: Path, notify: Notify | None = None, schema: Path | None = None
) -> Prepared:
    """Finds and converts what a run's model is evaluated on; the training set is not needed if `schema` is there.

    Args:
        evaluated: the source.
        data: the job's section.
        folder: what relative paths start from.
        notify: is told what takes time.
        schema: what the run keeps of its training set.

    Raises:
        DataError: if a source is missing, unreadable or empty, or does not fit the training set.
    """
    cache = (folder / cache_of(data)).resolve()
    say = notify or (lambda _: None)
    like = schema
    if like is None and data.train is not None:
        like = convert(find(data.train, folder), data, folder, cache, notify=say)
    store, notes = _evaluated(evaluated, data, folder, cache, like, say)
    return Prepared(None, str(store), evaluated.key, notes)


def _evaluated(
    evaluated: Evaluated, data: Data, folder: Path, cache: Path, like: Path | None, say: Notify
) -> tuple[Path, list[str]]:
    say(f"reading {evaluated.source}")
    found = find(evaluated.source, folder, evaluated.key, labelled=evaluated.labelled)
    store = convert(found, data, folder, cache, like=like, notify=say, labelled=evaluated.labelled)
    if like is not None:
        kinds = Manifest.read(like, files=False).kind, Manifest.read(store).kind
        if kinds[0] != kinds[1]:
            raise DataError(
                f"is a set of {kinds[1]}, the training set one of {kinds[0]}",
                where=f"{evaluated.key}, {evaluated.source}",
                fix="Give both in the same form",
            )
    return store, _left_out(found)


def _left_out(found: Found) -> list[str]:
    if not found.ignored:
        return []
    first = found.ignored[0].relative_to(found.root)
    one = len(found.ignored) == 1
    who = f"{first} is" if one else f"{len(found.ignored)} files, {first} the first, are"
    return [f"Of {found.name}, {who} left out: only images in the folder of a class are read"]


def _fingerprint(store: Path) -> str:
    return Manifest.read(store, files=False).fingerprint


def names_of(value: str | list[str] | None) -> list[str]:
    """One name, several or none, as a list."""
    return [value] if isinstance(value, str) else list(value or [])


def needed(data: Data, own: frozenset[str]) -> list[str] | None:
    """The columns that the job names; None, all, where functions of the task may ask for others.

    Args:
        data: the job's section.
        own: the functions that the task file has.
    """
    if own & {"inputs", "targets", "augment"} or not names_of(data.input):
        return None
    return [*names_of(data.input), *names_of(data.target)]
