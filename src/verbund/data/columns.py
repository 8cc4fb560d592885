"""Writing column files: values in, files and statistics out, in bounded memory."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verbund.data.manifest import Column, Kind

DISTINCT_LIMIT = 1_000_000
_REMAP_ROWS = 1 << 20


class Unsupported(Exception):
    """A column cannot be stored; the text says why. Only an error if the column is used.

    Args:
        reason: why.
        row: the row of the chunk that shows it, if it is one.
    """

    def __init__(self, reason: str, row: int | None = None) -> None:
        super().__init__(reason)
        self.row = row


@dataclass
class Chunk:
    """Some rows of one column.

    Args:
        values: shape [rows, *shape]; for texts int codes into `words`, -1 for a null. NaN is a missing number.
        kind: what the values mean.
        missing: which rows are null, for types that have no NaN.
        words: the texts that `values` are codes of.
    """

    values: NDArray[Any]
    kind: Kind
    missing: NDArray[np.bool_] | None = None
    words: list[str] | None = None


class ColumnWriter:
    """Appends chunks to one column file.

    Args:
        folder: of the store.
        file: name of the file.
        name: of the column.
        like: the training set's column, whose type and vocabulary this one must have.
        known: the training set's vocabulary.
    """

    def __init__(
        self, folder: Path, file: str, name: str, like: Column | None = None, known: list[str] | None = None
    ) -> None:
        self.name = name
        self._folder = folder
        self._file = file
        self._like = like
        self._known = known
        self._stream = open(folder / file, "wb")  # noqa: SIM115 (closed by finish or drop)
        self._rows = 0
        self._kind: Kind | None = None
        self._dtype: np.dtype[Any] | None = None
        self._shape: tuple[int, ...] = ()
        self._statistics = _Statistics()
        self._codes: dict[str, int] = {}
        self._table: NDArray[np.int32] | None = None
        self._table_of: list[str] | None = None
        self._used = np.zeros(1024, np.bool_)

    def write(self, chunk: Chunk) -> None:
        """Appends rows.

        Raises:
            Unsupported: if they do not fit what came before, or the training set.
            OSError: if the disk does not take them.
        """
        if chunk.words is not None and self._like is not None and self._like.kind != "text":
            raise _no_number(chunk, self._like)
        values = self._coded(chunk) if chunk.words is not None else chunk.values
        values = self._fitting(values, chunk.kind)
        if self._kind == "text":
            self._statistics.missing_rows(values < 0, self._rows)
        else:
            self._statistics.add(values, chunk.missing, self._rows)
        self._stream.write(np.ascontiguousarray(values).data.cast("B") if values.size else b"")
        self._rows += len(values)

    def finish(self) -> Column:
        """Closes the file and tells what it holds.

        Raises:
            OSError: if the disk does not take the rest.
        """
        self._stream.close()
        kind, dtype = self._kind or "number", self._dtype or np.dtype(np.float64)
        facts: dict[str, Any] = self._statistics.record()
        if kind == "text":
            facts |= self._sort()
        return Column(self.name, dtype.name, self._shape, kind, self._file, **facts)

    def close(self) -> None:
        """Closes the file, whatever became of it."""
        self._stream.close()

    def drop(self) -> None:
        """Gives up on the column and removes its file."""
        self._stream.close()
        (self._folder / self._file).unlink(missing_ok=True)

    def _fitting(self, values: NDArray[Any], kind: Kind) -> NDArray[Any]:
        if values.dtype.kind not in "biuf":
            raise Unsupported(f"columns of type {values.dtype} cannot be trained on")
        if values.dtype.itemsize > 8:
            values = values.astype(np.float64)
        if values.dtype.byteorder not in "=|":
            values = values.astype(values.dtype.newbyteorder("="))
        if self._dtype is None:
            self._kind, self._dtype, self._shape = kind, values.dtype, values.shape[1:]
            if self._like is not None:
                self._match(self._like, values.dtype, kind)
        if (kind == "text") != (self._kind == "text") or not np.can_cast(values.dtype, self._dtype, "safe"):
            raise Unsupported(f"its type changes from {self._dtype} to {values.dtype} at row {self._rows}")
        if 0 in values.shape[1:]:
            raise Unsupported(f"its rows are empty: each has the shape {list(values.shape[1:])}")
        if values.shape[1:] != self._shape:
            raise Unsupported(
                f"its shape changes from {list(self._shape)} to {list(values.shape[1:])} at row {self._rows}"
            )
        return values if values.dtype == self._dtype else values.astype(self._dtype)

    def _match(self, like: Column, dtype: np.dtype[Any], kind: Kind) -> None:
        """Takes over the training set's type where that loses nothing."""
        wanted = np.dtype(like.dtype)
        # int64 to float64 is what numpy calls safe; a file of whole numbers may well stand for the same column.
        if (like.kind == "text") != (kind == "text") or not np.can_cast(dtype, wanted, "safe"):
            there = "text" if like.kind == "text" else like.dtype
            raise Unsupported(f"it is {dtype.name} here, but {there} in the training set")
        if like.shape != self._shape:
            raise Unsupported(f"its shape is {list(self._shape)} here, but {list(like.shape)} in the training set")
        self._dtype = wanted

    def _coded(self, chunk: Chunk) -> NDArray[np.int32]:
        """The chunk's codes as codes of the whole column, in order of appearance for now."""
        assert chunk.words is not None
        if self._table_of is not chunk.words:
            codes = self._codes
            numbers = [-1 if word is None else codes.setdefault(word, len(codes)) for word in chunk.words]
            if len(codes) > DISTINCT_LIMIT:
                raise Unsupported(f"it has more than {DISTINCT_LIMIT:,} different texts; encode it as numbers")
            self._table = np.array([*numbers, -1], np.int32)
            self._table_of = chunk.words
            if len(codes) > len(self._used):
                self._used = np.concatenate([self._used, np.zeros(len(codes), np.bool_)])
        assert self._table is not None
        result: NDArray[np.int32] = self._table[chunk.values]
        self._used[result[result >= 0] if result.size and result.min() < 0 else result] = True
        return result

    def _sort(self) -> dict[str, Any]:
        """Replaces the codes in order of appearance by codes of the sorted vocabulary."""
        words = [word for word, code in self._codes.items() if self._used[code]]
        vocabulary = self._known if self._known is not None else sorted(words)
        order = {word: code for code, word in enumerate(vocabulary)}
        # The last entry is what code -1, a null, finds; -2 stands for unknown until it is counted.
        table = np.full(len(self._codes) + 1, -2, np.int32)
        table[-1] = -1
        for word in words:
            table[self._codes[word]] = order.get(word, -2)
        unknown, first_unknown = 0, None
        low, high = None, None
        if self._rows:
            stored = np.memmap(self._folder / self._file, np.int32, "r+")
            for start in range(0, self._rows, _REMAP_ROWS):
                part = table[stored[start : start + _REMAP_ROWS]]
                strange = np.flatnonzero(part == -2)
                if strange.size:
                    first_unknown = start + int(strange[0]) if first_unknown is None else first_unknown
                    unknown += len(strange)
                    part[strange] = -1
                stored[start : start + _REMAP_ROWS] = part
                low, high = _wider(low, high, int(part.min()), int(part.max()))
            stored.flush()
            del stored
        file = f"{Path(self._file).stem}.vocabulary.json"
        (self._folder / file).write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
        return {
            "minimum": low,
            "maximum": high,
            "unknown": unknown,
            "first_unknown": first_unknown,
            "values": len(vocabulary),
            "vocabulary": file,
        }


def _no_number(chunk: Chunk, like: Column) -> Unsupported:
    """Text where the training set has numbers."""
    assert chunk.words is not None
    for row, code in enumerate(chunk.values.tolist()):
        word = chunk.words[code] if code >= 0 else None
        if word is None:
            continue
        try:
            float(word)
        except ValueError:
            return Unsupported(f"it is text here, such as `{word[:40]}`, but {like.dtype} in the training set", row)
    return Unsupported(f"it is text here, but {like.dtype} in the training set")


def _wider(low: int | None, high: int | None, new_low: int, new_high: int) -> tuple[int, int]:
    return min(new_low, new_low if low is None else low), max(new_high, new_high if high is None else high)


class _Statistics:
    """Running minimum, maximum, missing rows and whether all values are whole."""

    def __init__(self) -> None:
        self._low: Any = None
        self._high: Any = None
        self._low_row: int | None = None
        self._high_row: int | None = None
        self._missing = 0
        self._first_missing: int | None = None
        self._first_fraction: int | None = None

    def missing_rows(self, missing: NDArray[np.bool_], first: int) -> None:
        """Counts the rows that are marked; `first` is the number of the first row."""
        rows = np.flatnonzero(missing)
        if rows.size:
            self._missing += len(rows)
            if self._first_missing is None:
                self._first_missing = first + int(rows[0])

    def add(self, values: NDArray[Any], missing: NDArray[np.bool_] | None, first: int) -> None:
        """Takes rows into account; `first` is the number of the first."""
        if not values.size:
            return
        width = values[0].size
        if missing is not None and missing.any():
            self.missing_rows(missing, first)
            kept = np.flatnonzero(~missing)
            self._extremes(values[kept].reshape(-1), width, first, kept)
            return
        flat = np.ascontiguousarray(values).reshape(-1)
        if flat.dtype.kind == "f":
            self._floats(flat, width, first)
        else:
            self._extremes(flat, width, first)

    def _floats(self, flat: NDArray[Any], width: int, first: int) -> None:
        rows: NDArray[np.int64] | None = None
        if np.isnan(flat.min()):
            nan = np.isnan(flat)
            self.missing_rows(nan.reshape(-1, width).any(axis=1), first)
            rows = np.flatnonzero(~nan)
            flat = flat[rows]
            rows, width = rows // width, 1
        self._extremes(flat, width, first, rows)
        if self._first_fraction is None and flat.size:
            # Most columns of fractions show it at once; only columns of whole numbers are looked at whole.
            for part in (slice(0, 256), slice(0, None)):
                strange = np.flatnonzero(flat[part] != np.floor(flat[part]))
                if strange.size:
                    place = int(strange[0])
                    row = place // width
                    self._first_fraction = first + (int(rows[row]) if rows is not None else row)
                    break

    def _extremes(self, flat: NDArray[Any], width: int, first: int, rows: NDArray[np.int64] | None = None) -> None:
        """`rows` are the rows that `flat` came from, if it is not all of them."""
        if not flat.size:
            return
        for low in (True, False):
            place = int(flat.argmin() if low else flat.argmax())
            value = flat[place].item()
            row = place // width
            row = first + (int(rows[row]) if rows is not None else row)
            if low and (self._low is None or value < self._low):
                self._low, self._low_row = value, row
            elif not low and (self._high is None or value > self._high):
                self._high, self._high_row = value, row

    def record(self) -> dict[str, Any]:
        """The fields of a `Column` that are known from here."""

        def number(value: Any) -> Any:
            return int(value) if isinstance(value, bool) else value

        return {
            "minimum": number(self._low),
            "maximum": number(self._high),
            "minimum_row": self._low_row,
            "maximum_row": self._high_row,
            "missing": self._missing,
            "first_missing": self._first_missing,
            "first_fraction": self._first_fraction,
        }
