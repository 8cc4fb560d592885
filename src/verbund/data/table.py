"""Converting a table to column files, chunk by chunk."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from verbund.data.columns import Chunk, ColumnWriter, Unsupported
from verbund.data.manifest import Column, Manifest, SourceFile, block_of, vocabulary
from verbund.errors import DataError

_NOTIFY_SECONDS = 1.0

LACKING = "it is in the training set only"
FURTHER = "the training set does not have it"

Notify = Callable[[str], None]
Rows = dict[str, Chunk | Unsupported]
"""Some rows: each column's chunk, or why it has none."""


class Table(Protocol):
    """A source of rows."""

    def batches(self) -> Iterator[tuple[int, int, Rows]]:
        """Index of the file, number of rows, and the rows; files in order, rows in order.

        Raises:
            DataError: naming the file and row, for what cannot be read.
        """
        ...

    @property
    def files(self) -> list[str]:
        """The files' names, for messages."""
        ...


@dataclass(frozen=True)
class Like:
    """The training set that a validation set must match."""

    folder: Path
    manifest: Manifest

    def column(self, name: str) -> Column | None:
        """The training set's column of that name."""
        return self.manifest.column(name)

    def vocabulary(self, name: str) -> list[str] | None:
        """The training set's vocabulary of a column of texts."""
        column = self.column(name)
        return vocabulary(self.folder, column) if column is not None and column.kind == "text" else None


def convert_table(
    table: Table,
    folder: Path,
    *,
    fingerprint: str,
    name: str,
    like: Like | None = None,
    notify: Notify | None = None,
) -> Manifest:
    """Writes all columns of `table` as column files to `folder`.

    Args:
        table: where the rows come from.
        folder: empty.
        fingerprint: for the manifest.
        name: of the source, for messages.
        like: the training set, if this is a validation set: types and vocabularies are its own, further columns are
            left out, and columns that do not fit are recorded as unsupported.
        notify: told about the progress, once a second.

    Raises:
        DataError: if there are no rows, or what the table raises.
    """
    writers: dict[str, ColumnWriter] = {}
    unsupported: dict[str, str] = {}
    rows = 0
    counts = [0] * len(table.files)
    due = time.monotonic() + _NOTIFY_SECONDS
    try:
        for file, count, chunks in table.batches():
            for column, chunk in chunks.items():
                if like is not None and like.column(column) is None:
                    unsupported[column] = FURTHER
                if column in unsupported:
                    continue
                try:
                    if isinstance(chunk, Unsupported):
                        raise chunk
                    if column not in writers:
                        place = f"c{len(writers) + len(unsupported)}.bin"
                        known = (like.column(column), like.vocabulary(column)) if like else ()
                        writers[column] = ColumnWriter(folder, place, column, *known)
                    writers[column].write(chunk)
                except Unsupported as reason:
                    place = f" ({table.files[file]}, row {counts[file] + reason.row})" if reason.row is not None else ""
                    unsupported[column] = f"{reason}{place}"
                    if column in writers:
                        writers.pop(column).drop()
            rows += count
            counts[file] += count
            if notify is not None and time.monotonic() >= due:
                notify(f"converting {name}: {rows:,} rows")
                due = time.monotonic() + _NOTIFY_SECONDS
        if rows == 0:
            raise DataError("is empty: it has no rows", where=name)
        if like is not None:
            for column in like.manifest.names:
                if column not in writers and column not in unsupported:
                    unsupported[column] = LACKING
        columns = tuple(writer.finish() for writer in writers.values())
    finally:
        for writer in writers.values():
            writer.close()
    sources = tuple(SourceFile(file, count) for file, count in zip(table.files, counts, strict=True))
    block = block_of(rows, sum(column.row_bytes for column in columns))
    return Manifest("columns", rows, columns, sources, fingerprint, block, unsupported)
