"""What is wrong with the columns that a job names, told from their statistics before anything is trained."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verbund.data.finding import EXTENSIONS
from verbund.data.manifest import Column, Manifest, vocabulary
from verbund.data.prepare import Prepared, names_of
from verbund.data.table import FURTHER, LACKING
from verbund.errors import Problem, nearest
from verbund.job import Data, Job

_LARGEST = float(np.finfo(np.float32).max)
_ROWS = 1 << 20
# What a CSV file has where a number is missing.
_NO_VALUE = frozenset(("", "na", "n/a", "#n/a", "nan", "null", "none"))


@dataclass(frozen=True)
class Wanted:
    """What a job does with its columns.

    Args:
        objective: the loss by name; None if the task has its own, which may take any value for what it likes.
        own: the functions that the task file has; what passes through them is their business.
        ignore_index: the class that cross_entropy leaves out, the only one that may be negative.
    """

    objective: str | None = None
    own: frozenset[str] = frozenset()
    ignore_index: int = -100

    @staticmethod
    def of(job: Job, own: frozenset[str]) -> Wanted:
        """What `job` does, whose task file has the functions `own`."""
        objective = job.train.objective
        if objective is None:
            return Wanted(None, own)
        return Wanted(None if "loss" in own else objective.name, own, objective.ignore_index)


def check_columns(prepared: Prepared, data: Data, wanted: Wanted) -> list[Problem]:
    """All that is wrong with the columns that the job names.

    Args:
        prepared: the converted data.
        data: the job's section.
        wanted: what the job does with them.
    """
    problems: list[Problem] = []
    for key, store in (("data.train", prepared.train), (prepared.key, prepared.validation)):
        if store is not None:
            problems += _Check(Path(store), key, data, wanted).problems()
    if not names_of(data.input) and not names_of(data.target):
        problems += _lost(prepared)
    return list(dict.fromkeys(problems))


def _lost(prepared: Prepared) -> list[Problem]:
    """Columns of the training set that the validation set lacks: the task's own functions may use any."""
    if prepared.train is None or prepared.validation is None:
        return []
    train, validation = Manifest.read(Path(prepared.train)), Manifest.read(Path(prepared.validation))
    lost = [name for name in train.names if name not in validation.names]
    return [_missing(validation, prepared.key, prepared.key, name) for name in lost]


class _Check:
    """The check of one store."""

    def __init__(self, store: Path, key: str, data: Data, wanted: Wanted) -> None:
        self._store = store
        self._manifest = Manifest.read(store)
        self._key = key
        self._data = data
        self._wanted = wanted

    def problems(self) -> list[Problem]:
        inputs = [self._column("data.input", name, self._input) for name in names_of(self._data.input)]
        targets = [self._column("data.target", name, self._target) for name in names_of(self._data.target)]
        return [problem for problem in [*inputs, *self._scales(), *targets] if problem is not None]

    def _column(self, setting: str, name: str, check: Callable[[Column], Problem | None]) -> Problem | None:
        column = self._manifest.column(name)
        return check(column) if column else _missing(self._manifest, self._key, setting, name)

    def _scales(self) -> list[Problem]:
        problems = []
        inputs = names_of(self._data.input)
        unknown = [name for name in inputs if name not in self._manifest.names]
        for name, scale in self._data.scale.items():
            if scale == 0:
                what = f"`{name}` is divided by {scale:g}"
                problems.append(Problem("data.scale", what, "Give a finite number other than 0"))
            if name not in inputs and not (unknown and name in self._manifest.names):
                # Where an input is misspelt, a scale that names a column of the data may well be right.
                fix = nearest(name, inputs) if inputs else None
                problems.append(Problem("data.scale", f"`{name}` is no column of `data.input`", fix))
        return problems

    def _input(self, column: Column) -> Problem | None:
        own = "inputs" in self._wanted.own
        if column.kind == "text" and not own:
            return self._text(column, "data.input", "of which a model can only take codes")
        if column.missing and (not own or not column.dtype.startswith("float")):
            return self._gap("data.input", column)
        return None if own else self._not_float32("data.input", column)

    def _target(self, column: Column) -> Problem | None:
        objective = self._wanted.objective
        own = objective is None or "targets" in self._wanted.own
        if column.missing and (not own or not column.dtype.startswith("float")):
            return self._gap("data.target", column)
        if column.unknown and column.first_unknown is not None:
            return self._at("data.target", column.first_unknown, _unknown(self._manifest, column))
        if own:
            return None
        if column.kind == "text":
            return self._text_target(column)
        if objective == "cross_entropy" and not (column.dtype.startswith("float") and column.shape):
            return self._classes(column)
        if problem := self._not_float32("data.target", column):
            return problem
        low, high = column.minimum, column.maximum
        if objective == "binary_cross_entropy" and low is not None and high is not None and (low < 0 or high > 1):
            row = column.minimum_row if low < 0 else column.maximum_row
            value = low if low < 0 else high
            return self._at("data.target", row, f"`{column.name}` is {value}; binary targets lie between 0 and 1")
        return None

    def _classes(self, column: Column) -> Problem | None:
        for value, row in ((column.minimum, column.minimum_row), (column.maximum, column.maximum_row)):
            if value is not None and not math.isfinite(value):
                return self._at("data.target", row, f"`{column.name}` is {value}", "Leave such rows out")
        if column.first_fraction is not None:
            what = f"`{column.name}` is not a whole number, so it names no class"
            return self._at("data.target", column.first_fraction, what, "Use the objective mean_squared_error")
        found = class_range(self._store, self._manifest, column, self._wanted.ignore_index)
        if found is not None and found.low < 0:
            what = f"`{column.name}` is {found.low}, below class 0"
            fix = f"Correct it, or name it as `train.objective.ignore_index`, which is {self._wanted.ignore_index}"
            return self._at("data.target", found.low_row, what, fix)
        return None

    # -- values that are no numbers ------------------------------------------------------------------------------

    def _text_target(self, column: Column) -> Problem | None:
        objective = self._wanted.objective
        if objective == "mean_squared_error":
            return self._text(column, "data.target", "which mean_squared_error cannot compare with numbers")
        words = vocabulary(self._store, column)
        codes = _column_values(self._store, self._manifest, column)
        if self._from_csv and "" in words:
            empty = words.index("")
            row = _first(codes, lambda part: part == empty)
            what = f"`{column.name}` has no value here"
            return self._at("data.target", row, what, "Fill it or leave such rows out")
        if objective == "binary_cross_entropy" and len(words) > 2:
            what = f"`{column.name}` has {len(words)} different texts, a binary target two"
            return Problem("data.target", what, "Use the objective cross_entropy")
        numbers = np.array([*map(_is_number, words), False])
        # Only a CSV file does not say whether its columns are texts.
        if self._from_csv and numbers.any() and 2 * _count(codes, lambda part: numbers[part]) > self._manifest.rows:
            return self._text(
                column,
                "data.target",
                "though most of its values are numbers",
                "Correct it; if these are names of classes, give Parquet or JSON lines, which say that they are text",
            )
        return None

    def _text(self, column: Column, setting: str, why: str, fix: str | None = None) -> Problem:
        """`why` a column of text is refused, with the first value that makes it one."""
        words = vocabulary(self._store, column)
        ordinary = np.array([*(_is_number(word) or word.strip().lower() in _NO_VALUE for word in words), True])
        if bool(ordinary.all()):
            what = f"`{column.name}` is text, {why}"
            return Problem(setting, what, fix or "Its values are numbers: store them as such")
        codes = _column_values(self._store, self._manifest, column)
        row = _first(codes, lambda part: ~ordinary[part])
        word = words[int(codes[row])]
        what = f"`{column.name}` is text, {why}: here it is `{_short(word)}`"
        stray = any(map(_is_number, words))  # else all of it is text, and this one no worse than the others
        if re.fullmatch(r"\s*[+-]?[\d.]*,\d+\s*", word):
            fix = "Write decimals with a point"
        elif fix is None:
            other = "use the objective cross_entropy for classes"
            if setting == "data.input":
                other = "leave the column out and use its codes in the task's `inputs(batch)`"
            fix = f"Correct it, or {other}" if stray else f"{other[0].upper()}{other[1:]}"
        return self._at(setting, row, what, fix)

    def _gap(self, setting: str, column: Column) -> Problem:
        what = "NaN or no value" if column.dtype.startswith("float") else "no value"
        rows = f"{column.missing} rows have" if column.missing > 1 else "1 row has"
        fix = "Fill them or leave these rows out"
        if column.dtype.startswith("float"):
            function = "inputs(batch)" if setting == "data.input" else "targets(batch)"
            fix += f", or treat them in the task's `{function}`"
        return self._at(setting, column.first_missing, f"{rows} {what} in `{column.name}`, this one first", fix)

    def _not_float32(self, setting: str, column: Column) -> Problem | None:
        """Infinite values, and those that become infinite as float32."""
        low, high = column.minimum, column.maximum
        if low is None or high is None or (low >= -_LARGEST and high <= _LARGEST):
            return None

        def large(values: NDArray[Any]) -> NDArray[np.bool_]:
            return np.asarray((np.abs(values.astype(np.float64)) > _LARGEST).reshape(len(values), -1).any(axis=1))

        values = _column_values(self._store, self._manifest, column)
        row, count = _first(values, large), _count(values, large)
        here = np.asarray(values[row], np.float64).reshape(-1)
        value = here[np.abs(here) > _LARGEST][0]
        more = f" ({count} rows have such values, this one first)" if count > 1 else ""
        why = ", which is more than float32 holds" if np.isfinite(value) else ""
        return self._at(setting, row, f"`{column.name}` is {value:g}{why}{more}", "Correct them or leave such rows out")

    @property
    def _from_csv(self) -> bool:
        return any(EXTENSIONS.get(Path(source.name).suffix.lower()) == "csv" for source in self._manifest.sources)

    def _at(self, setting: str, row: int | None, what: str, fix: str | None = None) -> Problem:
        return Problem(setting if row is None else f"{setting}, {self._manifest.place(row)}", what, fix)


# -- classes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClassRange:
    """The smallest and the largest class of a column, and a row that has it."""

    low: int
    low_row: int | None
    high: int
    high_row: int | None


def class_range(store: Path, manifest: Manifest, column: Column, ignore_index: int) -> ClassRange | None:
    """The classes of a column besides the one that is ignored; None if there is none."""
    low, high = column.minimum, column.maximum
    if low is None or high is None:
        return None
    if ignore_index not in (low, high) or column.file is None:
        return ClassRange(int(low), column.minimum_row, int(high), column.maximum_row)
    found: ClassRange | None = None
    for start, values in _parts(_column_values(store, manifest, column)):
        rows = values.reshape(len(values), -1)
        counted = rows != ignore_index
        if not counted.any():
            continue
        flat = np.flatnonzero(counted)
        kept = rows.reshape(-1)[flat]
        low_place, high_place = int(kept.argmin()), int(kept.argmax())
        width = rows.shape[1]
        here = ClassRange(
            int(kept[low_place]),
            start + int(flat[low_place]) // width,
            int(kept[high_place]),
            start + int(flat[high_place]) // width,
        )
        found = here if found is None else _wider(found, here)
    return found


def _wider(one: ClassRange, other: ClassRange) -> ClassRange:
    low = other if other.low < one.low else one
    high = other if other.high > one.high else one
    return ClassRange(low.low, low.low_row, high.high, high.high_row)


def too_many_classes(prepared: Prepared, data: Data, wanted: Wanted, outputs: int, layer: str | None) -> list[Problem]:
    """Classes for which a model has no output.

    Args:
        prepared: the converted data.
        data: the job's section.
        wanted: what the job does with its columns.
        outputs: how many classes the model tells apart.
        layer: what makes them, for the message.
    """
    if wanted.objective not in ("cross_entropy", "next_token") or "targets" in wanted.own:
        return []
    names = names_of(data.target)
    if wanted.objective == "next_token":
        names = names_of(data.input)[:1] or ["tokens"]
    sides = (prepared.train, prepared.validation)
    for store in (Path(side) for side in sides if side is not None):
        manifest = Manifest.read(store)
        for column in filter(None, map(manifest.column, names)):
            if column.dtype.startswith("float") and column.shape:
                continue  # probabilities
            found = class_range(store, manifest, column, wanted.ignore_index)
            if found is not None and found.high >= outputs:
                return [_too_few_outputs(store, manifest, column, found, outputs, layer)]
    return []


def _too_few_outputs(
    store: Path, manifest: Manifest, column: Column, found: ClassRange, outputs: int, layer: str | None
) -> Problem:
    has = f"the model has {outputs} output{'s' if outputs != 1 else ''} (classes 0 to {outputs - 1})"
    if layer is not None:
        has += f", made by {layer}"
    row = _row_of_class(store, manifest, column, found)
    place = f" in {manifest.place(row)}" if row is not None else ""
    words = vocabulary(store, column)
    name = f" (`{_short(words[found.high])}`)" if found.high < len(words) else ""
    if words or column.kind == "tokens":
        kind = "tokens" if column.kind == "tokens" else "classes"
        what = f"`{column.name}` has {column.values} {kind}, {found.high}{name} among them{place}, but {has}"
        return Problem("model()", what, f"Give the model {max(column.values or 0, found.high + 1)} outputs")
    what = f"`{column.name}` is {found.high}{place}, but {has}"
    return Problem("model()", what, f"Give the model {found.high + 1} outputs, or correct the value if it is no class")


def _row_of_class(store: Path, manifest: Manifest, column: Column, found: ClassRange) -> int | None:
    if found.high_row is not None or column.file is None or manifest.kind == "tokens":
        return found.high_row
    return _first(_column_values(store, manifest, column), lambda part: part == found.high)


# -- values ----------------------------------------------------------------------------------------------------------


def _column_values(store: Path, manifest: Manifest, column: Column) -> NDArray[Any]:
    """A column's values [rows, *shape], memory-mapped."""
    assert column.file is not None
    return np.memmap(store / column.file, column.dtype, "r", shape=(manifest.rows, *column.shape))


def _parts(values: NDArray[Any]) -> Iterator[tuple[int, NDArray[Any]]]:
    step = max(1, _ROWS // max(math.prod(values.shape[1:]), 1))
    for start in range(0, len(values), step):
        yield start, np.asarray(values[start : start + step])


def _first(values: NDArray[Any], bad: Callable[[NDArray[Any]], NDArray[np.bool_]]) -> int:
    """The first row that is bad; there is one."""
    for start, part in _parts(values):
        rows = np.flatnonzero(bad(part))
        if rows.size:
            return start + int(rows[0])
    raise AssertionError("no row is bad")


def _count(values: NDArray[Any], bad: Callable[[NDArray[Any]], NDArray[np.bool_]]) -> int:
    return sum(int(np.count_nonzero(bad(part))) for _, part in _parts(values))


def _is_number(word: str) -> bool:
    try:
        return math.isfinite(float(word))
    except ValueError:
        return False


def _short(word: str) -> str:
    line = " ".join(word.split())
    return line if len(line) <= 40 else f"{line[:40]}…"


def _unknown(manifest: Manifest, column: Column) -> str:
    more = f"; {column.unknown} rows have such" if column.unknown > 1 else ""
    return f"`{column.name}` has a text that the training set does not have{more}"


def _missing(manifest: Manifest, key: str, setting: str, name: str) -> Problem:
    reason = manifest.unsupported.get(name, LACKING)
    if reason != LACKING:
        return Problem(setting, f"column `{name}` of {key} cannot be used: {reason}")
    names = [*manifest.names, *(other for other, why in manifest.unsupported.items() if why == FURTHER)]
    fix = nearest(name, names)
    if len(names) == 1 and (mark := next((mark for mark in ";|\t " if mark in names[0]), None)):
        fix = f"Its only column is `{names[0]}`: separate columns by commas instead of `{mark}`"
    return Problem(setting, f"{key} has no column `{name}`", fix)
