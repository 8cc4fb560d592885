"""CSV and JSON lines as tables, read block by block with Arrow's parsers.

The first block of all files says what the columns are. Where a later one contradicts (a fraction in a column of whole
numbers, a word among numbers), `Contradiction` is raised, and after `settle` has looked at every row the table can be
read again. Rows are counted by records from 0; the header and blank lines do not count.
"""

from __future__ import annotations

import csv as plain_csv
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
from pyarrow import csv, json

from verbund.data.arrow import Decoder
from verbund.data.manifest import Manifest
from verbund.data.parquet import rows_of
from verbund.data.table import Rows
from verbund.errors import DataError

_BLOCK = 4 << 20
_LONGEST_LINE = 256 << 20
_BATCH_ROWS = 131_072


class Contradiction(Exception):
    """A later block does not have the types of the first: `settle`, and read again."""


class LinesTable(ABC):
    """Files of lines.

    Args:
        files: at least one, of the same columns.
        names: the files' names, for messages.
    """

    def __init__(self, files: tuple[Path, ...], names: list[str]) -> None:
        self.files = names
        self._paths = files
        self._types: dict[str, Any] = {}

    @abstractmethod
    def _parse(self, block: bytes, header: Any, types: dict[str, Any]) -> Any:
        """A block as an Arrow table; columns that `types` does not name get the type they seem to have.

        Raises:
            pa.ArrowInvalid: if it does not fit.
        """

    @abstractmethod
    def _header(self, stream: BinaryIO, path: Path) -> Any:
        """What comes before the first row, if the format has such."""

    def _cut(self, block: bytes) -> int:
        """The end of the last whole row in a block; 0 if there is none."""
        return block.rfind(b"\n") + 1

    def _unite(self, one: Any, other: Any) -> Any | None:
        """A type for values of both types; None if there is none."""
        schemas = [pa.schema([("", kind)]) for kind in (one, other)]
        try:
            return pa.unify_schemas(schemas, promote_options="permissive").field(0).type
        except pa.ArrowException:
            return None

    def batches(self) -> Iterator[tuple[int, int, Rows]]:
        """See `Table.batches`.

        Raises:
            DataError: naming file and row, for lines that cannot be parsed.
            Contradiction: see above.
        """
        if not self._types:
            self._look(first_only=True)
        decoders: dict[str, Decoder] = {}
        for index, path in enumerate(self._paths):
            for block, header, row in self._blocks(path):
                table = self._table(block, header, self._types, path, row)
                if {field.name: field.type for field in table.schema} != self._types:
                    raise Contradiction
                table = table.select(list(self._types))
                for batch in table.combine_chunks().to_batches(_BATCH_ROWS):
                    yield index, batch.num_rows, rows_of(batch, decoders)

    def settle(self) -> None:
        """Finds types that fit all rows of all files.

        Raises:
            DataError: if there are none for a column.
        """
        self._types = {}
        self._look(first_only=False)

    def _look(self, first_only: bool) -> None:
        for path in self._paths:
            for block, header, row in self._blocks(path):
                table = self._table(block, header, {}, path, row)
                for field in table.schema:
                    known = self._types.get(field.name, field.type)
                    united = self._unite(known, field.type)
                    if united is None:
                        raise DataError(
                            f"column `{field.name}` is {field.type} here, but {known} before",
                            where=f"{path}, near row {row}",
                            fix="Give all its values one type",
                        )
                    self._types[field.name] = united
                if first_only:
                    break

    def _table(self, block: bytes, header: Any, types: dict[str, Any], path: Path, row: int) -> Any:
        try:
            return self._parse(block, header, types)
        except pa.ArrowInvalid as error:
            failure: Exception = error
        if types:
            try:
                self._parse(block, header, {})
            except pa.ArrowInvalid as error:
                failure = error
            else:
                raise Contradiction
        names = header[0] if isinstance(header, tuple) else []
        comma = re.search(r"invalid value '[+-]?[\d.]*,\d+'", str(failure))
        raise DataError(
            _without_row(failure, names),
            where=f"{path}, row {row + _row_of(failure)}",
            fix="Write decimals with a point" if comma else None,
        )

    def _blocks(self, path: Path) -> Iterator[tuple[bytes, Any, int]]:
        """Blocks of whole rows, the file's header, and the number of the block's first row."""
        try:
            with open(path, "rb") as stream:
                header = self._header(stream, path)
                row = 0
                rest = b""
                while True:
                    fresh = stream.read(max(_BLOCK, len(rest)))
                    block = rest + fresh
                    cut = self._cut(block) if fresh else len(block)
                    if cut:
                        if not block[:cut].isspace():
                            yield block[:cut], header, row
                            row += self._rows_in(block[:cut])
                    elif len(block) > _LONGEST_LINE:
                        raise DataError(f"has a row of more than {_LONGEST_LINE >> 20} MiB", where=f"{path}, row {row}")
                    rest = block[cut:]
                    if not fresh:
                        return
        except OSError as error:
            raise DataError(f"cannot be read: {error.strerror or error}", where=str(path)) from None

    def _rows_in(self, block: bytes) -> int:
        """About how many rows a block has, for messages."""
        return len(block.splitlines()) - block.count(b"\n\n")


class CsvTable(LinesTable):
    """CSV files with a header line. Commas, semicolons or tabs separate: what the header has most of.

    Args:
        files: see `LinesTable`.
        names: see `LinesTable`.
        like: the training set; its columns of text and of fractions are read as such here too.
    """

    def __init__(self, files: tuple[Path, ...], names: list[str], like: Manifest | None = None) -> None:
        super().__init__(files, names)
        self._fixed = _types_of(like) if like is not None else {}
        self._first: list[str] | None = None

    def _parse(self, block: bytes, header: tuple[list[str], str], types: dict[str, Any]) -> Any:
        names, separator = header
        return csv.read_csv(
            pa.BufferReader(block),
            read_options=csv.ReadOptions(use_threads=False, block_size=len(block) + 1, column_names=names),
            parse_options=csv.ParseOptions(delimiter=separator, newlines_in_values=b'"' in block),
            convert_options=csv.ConvertOptions(
                column_types=types | {k: v for k, v in self._fixed.items() if k in names}
            ),
        )

    def _header(self, stream: BinaryIO, path: Path) -> tuple[list[str], str]:
        try:
            line = stream.readline(1 << 20).decode("utf-8-sig").strip("\r\n")
        except UnicodeDecodeError:
            raise DataError("is no UTF-8 text", where=str(path), fix="Save it as UTF-8") from None
        separator = max(",;\t", key=re.sub(r'"[^"]*"', "", line).count)
        names = next(plain_csv.reader([line], delimiter=separator), [])
        for name in names:
            if names.count(name) > 1:
                raise DataError(f"has two columns `{name}`", where=str(path), fix="Give them different names")
        if self._first is None:
            self._first = names
        elif names and set(names) != set(self._first):
            odd = min(set(names) ^ set(self._first))
            state = "is missing" if odd in self._first else "is new"
            raise DataError(
                f"differs from {self._paths[0].name}: column `{odd}` {state}",
                where=str(path),
                fix="Give all files the same columns",
            )
        return names, separator

    def _cut(self, block: bytes) -> int:
        # A newline within quotes ends no row: after the end of a row the number of quotes is even.
        cut = block.rfind(b"\n") + 1
        quotes = block.count(b'"', 0, cut)
        while quotes % 2:
            before = block.rfind(b"\n", 0, cut - 1) + 1
            quotes -= block.count(b'"', before, cut)
            cut = before
        return cut

    def _unite(self, one: Any, other: Any) -> Any:
        return super()._unite(one, other) or pa.string()


class JsonLinesTable(LinesTable):
    """JSON lines: an object a line. A key that a line lacks is a null there."""

    def _parse(self, block: bytes, header: None, types: dict[str, Any]) -> Any:
        known = [(name, kind) for name, kind in types.items() if not pa.types.is_null(kind)]
        table = json.read_json(
            pa.BufferReader(block),
            read_options=json.ReadOptions(use_threads=False, block_size=len(block) + 1),
            parse_options=json.ParseOptions(
                explicit_schema=pa.schema(known) if known else None, unexpected_field_behavior="infer"
            ),
        )
        for name, kind in types.items():
            if name not in table.schema.names:
                table = table.append_column(name, pa.nulls(table.num_rows, kind))
        return table

    def _header(self, stream: BinaryIO, path: Path) -> None:
        return None

    def _unite(self, one: Any, other: Any) -> Any | None:
        if pa.types.is_temporal(one) and pa.types.is_string(other):
            return other
        if pa.types.is_string(one) and pa.types.is_temporal(other):
            return one
        return super()._unite(one, other)


def _types_of(like: Manifest) -> dict[str, Any]:
    """How a CSV file's columns must be read to have the training set's types, where its own look might differ."""
    types = {}
    for column in like.columns:
        if column.kind == "text":
            types[column.name] = pa.string()
        elif column.kind == "number" and column.dtype == "float64" and not column.shape:
            types[column.name] = pa.float64()
    return types


def _row_of(error: Exception) -> int:
    """The row within a block that an error of Arrow's names, from 0."""
    if found := re.search(r"Row #(\d+)", str(error)):
        return int(found[1]) - 1
    if found := re.search(r"in row (\d+)", str(error)):
        return int(found[1])
    return 0


def _without_row(error: Exception, names: list[str]) -> str:
    """What an error of Arrow's says, with the column's name for its number."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    text = re.sub(r"\s*(Row #\d+: |in row \d+)", " ", text).strip()
    found = re.match(r"In CSV column #(\d+): *CSV conversion error to \w+: *(.*)", text)
    if found and int(found[1]) < len(names):
        return f"`{names[int(found[1])]}` holds numbers, but here an {found[2]}"
    text = re.sub(r"^(In CSV column #\d+: *)?(CSV|JSON) (parse|conversion) error(: *)?", "", text)
    return f"cannot be parsed: {text}"
