"""Arrow arrays as plain numpy columns of a fixed shape per row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from verbund.data.columns import Chunk, Unsupported

_PER_SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}


@dataclass
class Decoder:
    """Decodes the arrays of one column; remembers its last dictionary, since batches tend to share one."""

    _dictionary: Any = None
    _words: list[str] | None = None

    def decode(self, array: Any) -> Chunk:
        """One array as a chunk: [rows, *shape].

        Raises:
            Unsupported: with the reason, for a type that has no fixed shape per row.
        """
        if isinstance(array, pa.ChunkedArray):
            array = array.combine_chunks()
        kind = array.type
        if pa.types.is_dictionary(kind):
            if is_text(kind):
                return self._texts(array)
            array = array.dictionary_decode()
            kind = array.type
        if is_text(kind):
            return self._texts(array.dictionary_encode())
        if pa.types.is_boolean(kind):
            return _whole(array, False, "bool")
        if pa.types.is_integer(kind):
            return _whole(array, 0, "number")
        if pa.types.is_floating(kind):
            return Chunk(array.to_numpy(zero_copy_only=False), "number")
        if pa.types.is_decimal(kind):
            return Chunk(array.cast(pa.float64()).to_numpy(zero_copy_only=False), "number")
        if pa.types.is_temporal(kind):
            return _seconds(array)
        if _is_list(kind):
            return self._lists(array)
        if pa.types.is_null(kind):
            raise Unsupported("it has no values at all")
        if pa.types.is_struct(kind) or pa.types.is_map(kind):
            raise Unsupported(f"it is nested ({kind}); flatten it into columns of their own")
        raise Unsupported(f"columns of type {kind} cannot be trained on")

    def _texts(self, array: Any) -> Chunk:
        if self._dictionary is None or not (
            len(array.dictionary) == len(self._dictionary) and array.dictionary.equals(self._dictionary)
        ):
            self._dictionary = array.dictionary
            self._words = array.dictionary.to_pylist()
        indices = array.indices
        if indices.null_count:
            indices = indices.fill_null(-1) if pa.types.is_signed_integer(indices.type) else _signed(indices)
        return Chunk(indices.to_numpy(zero_copy_only=False), "text", words=self._words)

    def _lists(self, array: Any) -> Chunk:
        absent = _nulls(array)
        if pa.types.is_fixed_size_list(array.type):
            length = array.type.list_size
            inner = array.values.slice(array.offset * length, len(array) * length)
        else:
            lengths = pc.list_value_length(array).drop_null()
            if not len(lengths):
                raise Unsupported("it has lists of unknown length")
            bounds = pc.min_max(lengths).as_py()
            length = bounds["max"]
            if bounds["min"] != length:
                raise Unsupported(f"it has lists of different lengths ({bounds['min']} to {length})")
            inner = array.flatten()
            if absent is not None:
                # Null lists take no room in a list of variable length; give them some.
                places = np.cumsum(np.repeat(~absent, length)) - 1
                inner = inner.take(pa.array(np.maximum(places, 0)))
        if length == 0:
            raise Unsupported("its lists are empty")
        chunk = Decoder().decode(inner)
        if chunk.words is not None:
            raise Unsupported("it has lists of text")
        values = chunk.values.reshape(len(array), length, *chunk.values.shape[1:])
        missing = None if chunk.missing is None else np.asarray(chunk.missing.reshape(len(array), length).any(axis=1))
        if absent is not None:
            if values.dtype.kind == "f":
                values = values.copy()
                values[absent] = np.nan
            else:
                missing = absent if missing is None else np.logical_or(missing, absent)
        return Chunk(values, chunk.kind, missing)


def is_text(kind: Any) -> bool:
    """Whether values of an Arrow type are texts, as they are or by a dictionary."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or (hasattr(pa.types, "is_string_view") and pa.types.is_string_view(kind))
    )


def _is_list(kind: Any) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _signed(indices: Any) -> Any:
    return indices.cast(pa.int64()).fill_null(-1)


def _nulls(array: Any) -> NDArray[np.bool_] | None:
    if not array.null_count:
        return None
    nulls: NDArray[np.bool_] = array.is_null().to_numpy(zero_copy_only=False)
    return nulls


def _whole(array: Any, filler: int | bool, kind: Any) -> Chunk:
    missing = _nulls(array)
    if missing is not None:
        array = array.fill_null(filler)
    return Chunk(array.to_numpy(zero_copy_only=False), kind, missing)


def _seconds(array: Any) -> Chunk:
    kind = array.type
    if pa.types.is_date32(kind):
        whole, divisor = array.cast(pa.int32()), 1 / 86_400
    elif pa.types.is_date64(kind):
        whole, divisor = array.cast(pa.int64()), 1_000
    elif pa.types.is_time32(kind):
        whole, divisor = array.cast(pa.int32()), _PER_SECOND[kind.unit]
    elif pa.types.is_timestamp(kind) or pa.types.is_duration(kind) or pa.types.is_time64(kind):
        whole, divisor = array.cast(pa.int64()), _PER_SECOND[kind.unit]
    else:
        raise Unsupported(f"columns of type {kind} cannot be trained on")
    missing = _nulls(whole)
    numbers = (whole.fill_null(0) if missing is not None else whole).to_numpy(zero_copy_only=False)
    values = numbers * 86_400.0 if pa.types.is_date32(kind) else numbers / np.float64(divisor)
    if missing is not None:
        values[missing] = np.nan
    return Chunk(values, "time")
