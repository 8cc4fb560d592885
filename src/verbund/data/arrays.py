"""numpy files as a table: `.npz` with an array per column, `.npy` with one array, the column `data`."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verbund.data.columns import Chunk, Unsupported
from verbund.data.table import Rows
from verbund.errors import DataError

Array = NDArray[Any]

_BATCH_BYTES = 8 << 20
NPY_COLUMN = "data"


class ArrayTable:
    """`.npy` or `.npz` files with the same arrays, read in batches of about 8 MiB.

    The fields of a structured array are columns of their own. Nothing is unpickled: arrays of objects are unsupported.

    Raises:
        DataError: if a file cannot be read, or its arrays have different lengths or other names than the first's.
    """

    def __init__(self, files: tuple[Path, ...], names: list[str]) -> None:
        self.files = names
        self._paths = files

    def batches(self) -> Iterator[tuple[int, int, Rows]]:
        first: set[str] | None = None
        for index, path in enumerate(self._paths):
            with ExitStack() as stack:
                try:
                    arrays = _npz(path, stack) if path.suffix.lower() == ".npz" else {NPY_COLUMN: _npy(path)}
                    names = set(arrays)
                    if first is not None and names != first:
                        odd = min(names ^ first)
                        raise DataError(f"array `{odd}` is not in all files", where=str(path))
                    first = names
                    count = _length(arrays, path)
                    width = sum(max(array.row_bytes, 1) for array in arrays.values())
                    step = max(1, _BATCH_BYTES // max(width, 1))
                    for start in range(0, count, step):
                        rows = min(step, count - start)
                        batch: dict[str, Chunk | Unsupported] = {}
                        for name, array in arrays.items():
                            batch |= _columns(name, array.read(rows), len(arrays))
                        yield index, rows, batch
                except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
                    raise DataError(f"is no whole numpy file: {error}", where=str(path)) from None


@dataclass
class _Member:
    """An array that is read from its beginning to its end."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    stream: Any = None
    whole: Array | None = None
    place: int = 0

    @property
    def row_bytes(self) -> int:
        return int(np.prod(self.shape[1:], dtype=np.int64)) * self.dtype.itemsize

    def read(self, rows: int) -> Array | None:
        """The next rows; None if the type cannot be read."""
        if self.dtype.hasobject:
            return None
        start, self.place = self.place, self.place + rows
        if self.whole is not None:
            return self.whole[start : self.place]
        size = rows * self.row_bytes
        raw = self.stream.read(size)
        if len(raw) != size:
            raise EOFError(f"cut short at row {start + len(raw) // max(self.row_bytes, 1)}")
        return np.frombuffer(raw, self.dtype).reshape(rows, *self.shape[1:])


def _npy(path: Path) -> _Member:
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    return _Member(array.shape, array.dtype, whole=array)


def _npz(path: Path, stack: ExitStack) -> dict[str, _Member]:
    archive = stack.enter_context(zipfile.ZipFile(path))
    arrays = {}
    for entry in archive.namelist():
        if not entry.endswith(".npy"):
            continue
        stream = stack.enter_context(archive.open(entry))
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(stream)
        whole = None
        if fortran and len(shape) > 1 and not dtype.hasobject:
            # Rows do not lie together in this one; it has to be read whole.
            whole = np.frombuffer(stream.read(), dtype).reshape(shape, order="F")
        arrays[entry.removesuffix(".npy")] = _Member(shape, dtype, stream, whole)
    if not arrays:
        raise ValueError("it has no arrays")
    return arrays


def _length(arrays: dict[str, _Member], path: Path) -> int:
    lengths = {}
    for name, array in arrays.items():
        if not array.shape:
            raise DataError(f"array `{name}` is a single number, not one per sample", where=str(path))
        lengths[name] = array.shape[0]
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"`{name}` {length}" for name, length in lengths.items())
        raise DataError(f"arrays have different numbers of rows: {told}", where=str(path))
    return next(iter(lengths.values()))


def _columns(name: str, values: Array | None, count: int) -> Rows:
    if values is None:
        return {name: Unsupported("it holds Python objects, which are not read")}
    if values.dtype.names:
        prefix = "" if count == 1 else f"{name}."
        return {f"{prefix}{field}": _chunk(values[field]) for field in values.dtype.names}
    return {name: _chunk(values)}


def _chunk(values: Array) -> Chunk | Unsupported:
    kind = values.dtype.kind
    if kind == "b":
        return Chunk(values, "bool")
    if kind in "iuf":
        return Chunk(values, "number")
    if kind in "US":
        if values.ndim > 1:
            return Unsupported("it has arrays of text")
        words, codes = np.unique(values.astype(str), return_inverse=True)
        return Chunk(codes.reshape(-1), "text", words=words.tolist())
    if kind in "mM":
        spans = values if kind == "m" else values - np.datetime64(0, "s")
        return Chunk((spans / np.timedelta64(1, "s")).astype(np.float64), "time")
    return Unsupported(f"arrays of type {values.dtype} cannot be trained on")
