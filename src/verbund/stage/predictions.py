"""Predictions as a file: parts written by the workers, merged in the order of the samples."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verbund.comm.files import PART_BYTES, Location, new_file
from verbund.errors import DataError, InputError

Column = NDArray[Any] | list[str | None]


def check_target(target: Path) -> None:
    """Refuses a file that predictions cannot become, before anything is computed.

    Raises:
        InputError: for a folder, an unknown ending, or a folder that is not there.
    """
    if target.is_dir():
        raise InputError(f"{target} is a folder", where="--out", fix="Name a file in it")
    if target.exists() and not target.is_file():
        raise InputError(f"{target} is a pipe or a device", where="--out", fix="Name a file")
    if target.suffix.lower() not in _FORMATS:
        ending = f"the ending `{target.suffix}`" if target.suffix else "no ending"
        known = ", ".join(_FORMATS)
        raise InputError(f"{target} has {ending}, which says no format", where="--out", fix=f"Known: {known}")
    if not target.parent.is_dir():
        raise InputError(f"no such folder: {target.parent}", where="--out")


class PartWriter:
    """Writes batches of columns to one Parquet file.

    Args:
        path: the file; removed again if the block that uses the writer fails.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: Any = None

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        try:
            if self._writer is not None:
                self._writer.close()
        except OSError as error:
            if kind is None:
                raise _unwritten(self._path, error) from None
        finally:
            if kind is not None:
                self._path.unlink(missing_ok=True)

    def write(self, columns: dict[str, Column]) -> None:
        """Appends rows: columns of equal length; those of more dimensions become fixed-size lists."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        batch = pa.RecordBatch.from_pydict({name: _arrow(values) for name, values in columns.items()})
        try:
            if self._writer is None:
                self._writer = pq.ParquetWriter(self._path, batch.schema)
            self._writer.write_batch(batch)
        except OSError as error:
            raise _unwritten(self._path, error) from None


@contextmanager
def written_to(location: Location) -> Iterator[Path]:
    """A path of this host for what is to come to a location; it is sent there when the block ends."""
    if isinstance(location, Path):
        yield location
        return
    with tempfile.TemporaryDirectory(prefix="verbund-part-") as folder:
        path = Path(folder) / "part"
        yield path
        if path.exists():
            with open(path, "rb") as source, new_file(location) as target:
                digest = hashlib.sha256()
                while chunk := source.read(PART_BYTES):
                    digest.update(chunk)
                    target.write(memoryview(chunk))
                target.finish(digest.hexdigest())


def merge(parts: list[Path], target: Path) -> None:
    """Joins the parts that exist, in order, into `target`, a batch at a time; `target` appears whole or not at all.

    Args:
        parts: Parquet files.
        target: its ending says the format.

    Raises:
        DataError: if the disk is full or the folder cannot be written.
        InputError: if the format cannot hold what is predicted.
    """
    import pyarrow.parquet as pq

    temporary = target.with_name(f".{target.name}.partial")
    writer: Any = None
    try:
        for part in (part for part in parts if part.exists()):
            with pq.ParquetFile(part) as source:
                if writer is None:
                    writer = _FORMATS[target.suffix.lower()](temporary, source.schema_arrow)
                for batch in source.iter_batches(65536):
                    writer.write_batch(batch)
        if writer is None:
            raise DataError("no sample was predicted", where=str(target))
        writer.close()
        os.replace(temporary, target)
    except OSError as error:
        raise _unwritten(target, error) from None
    finally:
        temporary.unlink(missing_ok=True)


class _JsonLines:
    """An object a line."""

    def __init__(self, path: Path, schema: Any) -> None:
        self._stream = open(path, "w", encoding="utf-8")  # noqa: SIM115 (closed by close)

    def write_batch(self, batch: Any) -> None:
        for row in batch.to_pylist():
            self._stream.write(json.dumps(row, ensure_ascii=False) + "\n")

    def close(self) -> None:
        self._stream.close()


class _Csv:
    """A line a sample; the k values of a list become the columns NAME_0 … NAME_(k − 1)."""

    def __init__(self, path: Path, schema: Any) -> None:
        import pyarrow as pa
        from pyarrow import csv

        fields: list[Any] = []
        for field in schema:
            if not pa.types.is_fixed_size_list(field.type):
                fields.append(field)
            elif pa.types.is_fixed_size_list(field.type.value_type):
                what = f"CSV has no place for `{field.name}`, which has several dimensions"
                raise InputError(what, where="--out", fix="Name a .parquet or .jsonl file")
            else:
                fields += [pa.field(f"{field.name}_{i}", field.type.value_type) for i in range(field.type.list_size)]
        self._schema = pa.schema(fields)
        self._writer = csv.CSVWriter(path, self._schema)

    def write_batch(self, batch: Any) -> None:
        import pyarrow as pa

        columns: list[Any] = []
        for column in batch.columns:
            if pa.types.is_fixed_size_list(column.type):
                size, values = column.type.list_size, column.flatten()
                columns += [values.take(pa.array(np.arange(i, len(values), size))) for i in range(size)]
            else:
                columns.append(column)
        self._writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=self._schema))

    def close(self) -> None:
        self._writer.close()


def _parquet(path: Path, schema: Any) -> Any:
    import pyarrow.parquet as pq

    return pq.ParquetWriter(path, schema)


_FORMATS: dict[str, Callable[[Path, Any], Any]] = {".parquet": _parquet, ".csv": _Csv, ".jsonl": _JsonLines}


def _unwritten(path: Path, error: OSError) -> DataError:
    return DataError(f"predictions cannot be written: {error.strerror or error}", where=str(path))


def _arrow(values: Column) -> Any:
    import pyarrow as pa

    if isinstance(values, list):
        return pa.array(values, pa.string())
    array = pa.array(np.ascontiguousarray(values).reshape(-1))
    for size in reversed(values.shape[1:]):
        array = pa.FixedSizeListArray.from_arrays(array, size)
    return array
