"""Predictions as Parquet: parts written by the workers, merged in the order of the samples."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verbund.errors import DataError


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
        if self._writer is not None:
            self._writer.close()
        if kind is not None:
            self._path.unlink(missing_ok=True)

    def write(self, columns: dict[str, NDArray[Any]]) -> None:
        """Appends rows: columns of equal length; those of more dimensions become fixed-size lists."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        batch = pa.RecordBatch.from_pydict({name: _arrow(values) for name, values in columns.items()})
        try:
            if self._writer is None:
                self._writer = pq.ParquetWriter(self._path, batch.schema)
            self._writer.write_batch(batch)
        except OSError as error:
            raise DataError(f"predictions cannot be written: {error}", where=str(self._path)) from None


def merge(parts: list[Path], target: Path) -> None:
    """Joins the parts that exist, in order, into `target`, a batch at a time; `target` appears whole or not at all.

    Raises:
        DataError: if the disk is full or the folder cannot be written.
    """
    import pyarrow.parquet as pq

    temporary = target.with_name(f".{target.name}.partial")
    writer = None
    try:
        for part in (part for part in parts if part.exists()):
            with pq.ParquetFile(part) as source:
                if writer is None:
                    writer = pq.ParquetWriter(temporary, source.schema_arrow)
                for batch in source.iter_batches(65536):
                    writer.write_batch(batch)
        if writer is None:
            raise DataError("no sample was predicted", where=str(target))
        writer.close()
        os.replace(temporary, target)
    except OSError as error:
        raise DataError(f"predictions cannot be written: {error}", where=str(target)) from None
    finally:
        temporary.unlink(missing_ok=True)


def _arrow(values: NDArray[Any]) -> Any:
    import pyarrow as pa

    array = pa.array(np.ascontiguousarray(values).reshape(-1))
    for size in reversed(values.shape[1:]):
        array = pa.FixedSizeListArray.from_arrays(array, size)
    return array
