"""The manifest of a store: what a converted data set holds, column by column, in one JSON file.

A store is a folder with `manifest.json` and one file per column: raw little-endian values, row-major, a fixed shape
per row. Texts are codes into a sorted vocabulary, which lies in a JSON file of its own. Statistics are taken while the
data is converted, so that checks of labels cost nothing later.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from verbund.errors import DataError

VERSION = 1
NAME = "manifest.json"
FILES = "files.json"
SMALL_STORE = 1 << 30
BLOCK_BYTES = 256 << 10

Kind = Literal["number", "bool", "time", "text", "image", "label", "tokens"]
StoreKind = Literal["columns", "images", "tokens"]


@dataclass(frozen=True)
class Column:
    """One column and its statistics.

    Args:
        name: as in the source.
        dtype: numpy's name of the stored type.
        shape: of one row; () for a scalar.
        kind: what it was in the source. `time` is float64 seconds (since 1970 for dates, UTC); `text` is int32 codes,
            -1 for a null or a text that the training set does not have.
        file: the column's file in the store; None for images, which are decoded when they are read.
        minimum, maximum: of all values that are not missing; None if there is none.
        minimum_row, maximum_row: a row that holds it.
        missing: rows with a null or NaN; first_missing is the first of them.
        unknown: rows whose text the training set does not have; first_unknown is the first of them.
        first_fraction: the first row with a value that is not whole; None if all are.
        values: how many different values there can be (classes, texts, tokens), where that is known.
        vocabulary: file with the sorted list of texts or class names, if there is one.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: Kind
    file: str | None
    minimum: float | int | None = None
    maximum: float | int | None = None
    minimum_row: int | None = None
    maximum_row: int | None = None
    missing: int = 0
    first_missing: int | None = None
    unknown: int = 0
    first_unknown: int | None = None
    first_fraction: int | None = None
    values: int | None = None
    vocabulary: str | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class SourceFile:
    """A file that rows came from, in order: `rows` of them."""

    name: str
    rows: int


@dataclass(frozen=True)
class Manifest:
    """A store's description.

    Args:
        kind: `columns`; `images`: `files.json` lists the files below `root`; `tokens`: samples are windows of
            `sequence` + 1 tokens of one stream.
        rows: samples.
        columns: what each sample has.
        sources: the files it was made of.
        unsupported: column of the source to the reason why it is not here.
        fingerprint: sha256 over the content of the source and all that shaped the conversion.
        block: samples that lie together: 1 for a store that fits into memory, else as many as make 256 KiB.
        root: images only: the folder of the images.
        sequence: tokens only: the samples' stride.
    """

    kind: StoreKind
    rows: int
    columns: tuple[Column, ...]
    sources: tuple[SourceFile, ...]
    fingerprint: str
    block: int = 1
    unsupported: dict[str, str] = field(default_factory=dict)
    root: str | None = None
    sequence: int | None = None

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The columns' names, in order."""
        return tuple(column.name for column in self.columns)

    def column(self, name: str) -> Column | None:
        """The column of that name."""
        return next((column for column in self.columns if column.name == name), None)

    def place(self, row: int) -> str:
        """Where a row came from: `FILE, row N`, counted from 0 within its file."""
        starts = [0]
        for source in self.sources:
            starts.append(starts[-1] + source.rows)
        if not self.sources or row >= starts[-1]:
            return f"row {row}"
        index = bisect_right(starts, row) - 1
        if self.kind == "images":
            return self.sources[index].name
        return f"{self.sources[index].name}, row {row - starts[index]}"

    def write(self, folder: Path) -> None:
        """Writes `manifest.json`."""
        record = {"format": "verbund-data", "version": VERSION, **asdict(self)}
        for column in record["columns"]:
            column["minimum"], column["maximum"] = _plain(column["minimum"]), _plain(column["maximum"])
        (folder / NAME).write_text(json.dumps(record, ensure_ascii=False, allow_nan=False), encoding="utf-8")

    @staticmethod
    def read(folder: Path, files: bool = True) -> Manifest:
        """Reads a store's manifest and checks that the columns' files have the sizes it tells.

        Args:
            folder: the store.
            files: False for what a run keeps of its training set, which is the manifest without the values.

        Raises:
            DataError: if the manifest is missing, of another version, or a file is missing or cut short.
        """
        path = folder / NAME
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise DataError("no such manifest", where=str(path)) from None
        except (OSError, ValueError) as error:
            raise DataError(f"cannot be read: {error}", where=str(path)) from None
        if not isinstance(record, dict) or record.pop("format", None) != "verbund-data":
            raise DataError("is not the manifest of a data set", where=str(path))
        if (version := record.pop("version", None)) != VERSION:
            raise DataError(
                f"has version {version}, this program reads version {VERSION}",
                where=str(path),
                fix="Convert the source again",
            )
        try:
            columns = tuple(_column(column) for column in record.pop("columns"))
            sources = tuple(SourceFile(**source) for source in record.pop("sources"))
            manifest = Manifest(columns=columns, sources=sources, **record)
        except (TypeError, KeyError, ValueError) as error:
            raise DataError(f"is damaged: {error}", where=str(path)) from None
        if files:
            manifest._check_files(folder)
        return manifest

    def _check_files(self, folder: Path) -> None:
        for column in self.columns:
            if column.file is None:
                continue
            path = folder / column.file
            size = path.stat().st_size if path.is_file() else -1
            need = self.rows * column.row_bytes
            if self.kind == "tokens" and self.sequence is not None:
                need = (self.rows * self.sequence + 1) * np.dtype(column.dtype).itemsize
            if size < need:
                state = "is missing" if size < 0 else f"has {size} bytes of {need}"
                raise DataError(f"column `{column.name}` {state}", where=str(path), fix="Convert the source again")


def vocabulary(folder: Path, column: Column) -> list[str]:
    """A column's sorted texts or class names; empty if it has none."""
    if column.vocabulary is None:
        return []
    words: list[str] = json.loads((folder / column.vocabulary).read_text(encoding="utf-8"))
    return words


def block_of(rows: int, row_bytes: int) -> int:
    """The block size of a store: a pure function of the data, never of who reads it."""
    return 1 if rows * row_bytes < SMALL_STORE else max(1, BLOCK_BYTES // max(row_bytes, 1))


def _plain(value: float | int | None) -> float | int | str | None:
    """JSON has no infinity."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _column(record: dict[str, Any]) -> Column:
    record["shape"] = tuple(record["shape"])
    for key in ("minimum", "maximum"):
        if isinstance(record[key], str):
            record[key] = float(record[key])
    return Column(**record)
