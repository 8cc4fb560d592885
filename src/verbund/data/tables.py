"""Tables as streams of columns: Parquet, CSV, JSON lines, npy and npz."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from verbund.data.columns import Chunk, Unsupported
from verbund.data.finding import SourceKind
from verbund.errors import DataError

_ROWS = 1 << 17
Rows = dict[str, Chunk | Unsupported]
"""Some rows of a table: each column's chunk, or why it has none."""


def read_table(path: Path, kind: SourceKind) -> Iterator[Rows]:
    """The rows of one file, some at a time; every batch has the file's columns in the file's order.

    Raises:
        DataError: if the file cannot be read as what it claims to be.
    """
    if kind in ("npy", "npz"):
        yield from _arrays(path, kind)
        return
    import pyarrow as pa

    from verbund.data.arrow import Decoder

    decoders: dict[str, Decoder] = {}
    try:
        for batch in _batches(path, kind):
            rows: Rows = {}
            for name, array in zip(batch.schema.names, batch.columns, strict=True):
                if name in rows:
                    raise DataError(f"has two columns `{name}`", where=str(path), fix="Give them different names")
                try:
                    rows[name] = decoders.setdefault(name, Decoder()).decode(array)
                except Unsupported as reason:
                    rows[name] = reason
            yield rows
    except pa.ArrowInvalid as error:
        raise DataError(f"is no valid {kind} file: {_first(error)}", where=str(path)) from None
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"cannot be read: {_first(error)}", where=str(path)) from None


def _batches(path: Path, kind: SourceKind) -> Iterator[Any]:
    import pyarrow as pa

    if kind == "parquet":
        import pyarrow.parquet as pq

        with pq.ParquetFile(path) as file:
            schema = file.schema_arrow
            texts = [
                field.name for field in schema if pa.types.is_string(field.type) or pa.types.is_large_string(field.type)
            ]
        # Texts come as codes and a dictionary, which costs a fraction of the texts themselves.
        with pq.ParquetFile(path, read_dictionary=texts, memory_map=True) as file:
            yield from file.iter_batches(_ROWS)
    elif kind == "csv":
        from pyarrow import csv

        if path.stat().st_size == 0:
            return
        with csv.open_csv(path) as reader:
            yield from reader
    else:
        from pyarrow import json

        if path.stat().st_size == 0:
            return
        with json.open_json(path) as reader:
            yield from reader


def _arrays(path: Path, kind: SourceKind) -> Iterator[Rows]:
    try:
        loaded = np.load(path, mmap_mode="r" if kind == "npy" else None, allow_pickle=False)
        arrays = {path.stem: loaded} if kind == "npy" else {name: loaded[name] for name in loaded.files}
    except (OSError, ValueError, EOFError, KeyError) as error:
        raise DataError(f"is no valid {kind} file: {_first(error)}", where=str(path)) from None
    except Exception as error:  # zipfile has errors of its own for a file that is cut short
        raise DataError(f"is no valid {kind} file: {_first(error)}", where=str(path)) from None
    lengths = {name: len(array) if array.ndim else None for name, array in arrays.items()}
    rows = max((n for n in lengths.values() if n is not None), default=0)
    reasons = {}
    for name, array in arrays.items():
        if lengths[name] != rows:
            reasons[name] = Unsupported(f"it has {lengths[name]} rows, while others have {rows}")
        elif array.dtype.kind in "US":
            words, codes = np.unique(array, return_inverse=True)
            arrays[name] = _Words(codes.reshape(array.shape), [str(word) for word in words])
    for start in range(0, rows, _ROWS):
        yield {
            name: reasons[name] if name in reasons else _chunk(array, slice(start, start + _ROWS))
            for name, array in arrays.items()
        }


class _Words:
    """An array of texts as codes."""

    def __init__(self, codes: np.ndarray[Any, Any], words: list[str]) -> None:
        self.codes, self.words = codes, words


def _chunk(array: Any, rows: slice) -> Chunk | Unsupported:
    if isinstance(array, _Words):
        if array.codes.ndim > 1:
            return Unsupported("it has several texts per row")
        return Chunk(array.codes[rows], "text", words=array.words)
    if array.dtype.kind == "M":
        return Chunk(array[rows].astype("datetime64[us]").astype(np.int64) / 1e6, "time")
    values = np.ascontiguousarray(array[rows])
    return Chunk(values, "bool" if values.dtype.kind == "b" else "number")


def _first(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
