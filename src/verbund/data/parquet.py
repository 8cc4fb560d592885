"""Parquet files as a table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verbund.data.arrow import Decoder, is_text
from verbund.data.columns import Chunk, Unsupported
from verbund.data.table import Rows
from verbund.errors import DataError

_BATCH_BYTES = 8 << 20
_BATCH_ROWS = 131_072
_BUFFER = 1 << 20


class ParquetTable:
    """Parquet files of one schema, read in batches of about 8 MiB.

    Raises:
        DataError: if a file is no whole Parquet file, or its columns differ from the first one's.
    """

    def __init__(self, files: tuple[Path, ...], names: list[str], wanted: set[str] | None = None) -> None:
        self.files = names
        self._paths = files
        self._wanted = wanted
        first: Any = None
        for path in files:
            schema = _schema(path)
            if first is None:
                first = schema
                _check_names(schema, path)
            elif difference := _difference(first, schema):
                raise DataError(
                    f"differs from {files[0].name}: {difference}",
                    where=str(path),
                    fix="Give all files the same columns",
                )

    def batches(self) -> Iterator[tuple[int, int, Rows]]:
        decoders: dict[str, Decoder] = {}
        for index, path in enumerate(self._paths):
            file = _opened(path)
            names = [name for name in file.schema_arrow.names if self._wanted is None or name in self._wanted]
            done = 0
            try:
                for batch in file.iter_batches(_batch_rows(file), columns=names):
                    yield index, batch.num_rows, rows_of(batch, decoders)
                    done += batch.num_rows
            except (pa.ArrowException, OSError) as error:
                raise DataError(
                    f"is damaged or cut short after row {done}: {_first_line(error)}", where=str(path)
                ) from None


def rows_of(batch: Any, decoders: dict[str, Decoder]) -> Rows:
    """A record batch, decoded."""
    rows: dict[str, Chunk | Unsupported] = {}
    for name, array in zip(batch.schema.names, batch.columns, strict=True):
        try:
            rows[name] = decoders.setdefault(name, Decoder()).decode(array)
        except Unsupported as reason:
            rows[name] = reason
    return rows


def _schema(path: Path) -> Any:
    try:
        return pq.read_schema(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"is no whole Parquet file: {_first_line(error)}", where=str(path)) from None


def _opened(path: Path) -> Any:
    # Texts of few different values are stored as dictionaries; taking these over saves comparing every text.
    texts = [field.name for field in _schema(path) if is_text(field.type)]
    try:
        return pq.ParquetFile(path, read_dictionary=texts, buffer_size=_BUFFER, pre_buffer=False)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"is no whole Parquet file: {_first_line(error)}", where=str(path)) from None


def _batch_rows(file: Any) -> int:
    rows = max(file.metadata.num_rows, 1)
    stored = sum(file.metadata.row_group(i).total_byte_size for i in range(file.metadata.num_row_groups)) / rows
    width = max(stored, sum(_width(field.type) for field in file.schema_arrow))
    return int(min(max(_BATCH_BYTES / max(width, 1.0), 16), _BATCH_ROWS))


def _width(kind: Any) -> int:
    """Bytes of one decoded value, where the type tells; a dictionary on disk may be much smaller."""
    if pa.types.is_fixed_size_list(kind):
        return int(kind.list_size) * _width(kind.value_type)
    try:
        return max(int(kind.bit_width) // 8, 1)
    except ValueError:
        return 8


def _check_names(schema: Any, path: Path) -> None:
    seen: set[str] = set()
    for name in schema.names:
        if name in seen:
            raise DataError(f"has two columns `{name}`", where=str(path))
        seen.add(name)


def _difference(first: Any, other: Any) -> str | None:
    for field in first:
        index = other.get_field_index(field.name)
        if index < 0:
            return f"column `{field.name}` is missing"
        kind = other.field(index).type
        if kind != field.type and not (is_text(kind) and is_text(field.type)):
            return f"column `{field.name}` is {kind}, not {field.type}"
    extra = set(other.names) - set(first.names)
    return f"column `{min(extra)}` is new" if extra else None


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
