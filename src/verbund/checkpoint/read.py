"""The reading side of a checkpoint: any box of any tensor, however it was cut when it was saved."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from verbund.checkpoint.box import Box
from verbund.checkpoint.manifest import DTYPES, Manifest, StoredBox, StoredTensor
from verbund.checkpoint.piece import dtype_name
from verbund.checkpoint.remote import RemoteShard
from verbund.checkpoint.sparse import Filler, StoredRows
from verbund.comm.files import Location
from verbund.errors import CheckpointError
from verbund.randomness.rows import born

_OPEN_FILES = 32
_RUN = 1 << 16
"""Rows of a sparse box at a time."""


class Checkpoint:
    """A saved state of a run. Reads boxes from mapped files, or from the run's owner; never the
    whole model.

    Use it as a context manager, or `close` it, to give the mapped files back.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._open: dict[str, Any] = {}

    @staticmethod
    def open(path: Location, verify: bool = True) -> Checkpoint:
        """Opens a checkpoint's folder.

        Args:
            path: the folder; of one at the run's owner only the boxes that are read travel.
            verify: compare every file with its hash. A worker whose supervisor has done so need not.

        Raises:
            CheckpointError: naming the file that is missing or damaged.
        """
        return Checkpoint(Manifest.open(path, verify))

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def state(self) -> dict[str, Any]:
        """What `commit` was given besides tensors."""
        return self.manifest.state

    def names(self, kind: str) -> list[str]:
        """The global names of this kind."""
        return self.manifest.names(kind)

    def shape(self, kind: str, name: str) -> tuple[int, ...]:
        """The global shape. Raises `CheckpointError` if there is no such tensor."""
        return self.manifest.shape(kind, name)

    def dtype(self, kind: str, name: str) -> torch.dtype:
        """The dtype. Raises `CheckpointError` if there is no such tensor."""
        return _dtype(self.manifest.tensor(kind, name).dtype)

    def read(
        self, kind: str, name: str, offset: Sequence[int] | None = None, length: Sequence[int] | None = None
    ) -> Tensor:
        """A box of a tensor, on the CPU.

        Args:
            kind: of the tensor.
            name: its global name.
            offset: where the box begins, per dimension; default: at 0.
            length: how long it is, per dimension; default: to the end.

        Raises:
            CheckpointError: if there is no such tensor or box, or the file holds something else.
        """
        stored = self.manifest.tensor(kind, name)
        begin = tuple(offset) if offset is not None else (0,) * len(stored.shape)
        if length is None:
            length = [size - start for size, start in zip(stored.shape, begin, strict=False)]
        box = self._box(stored, begin, tuple(length))
        values = torch.empty(box.length, dtype=_dtype(stored.dtype))
        self._fill(stored, box, values)
        return values

    def fill(self, kind: str, name: str, tensor: Tensor, offset: Sequence[int] | None = None) -> None:
        """Reads a box into `tensor`, whose shape is the box's length.

        Args:
            kind: of the tensor.
            name: its global name.
            tensor: is overwritten, on any device; must have the saved dtype.
            offset: where the box begins; None: `tensor` is the whole tensor.

        Raises:
            CheckpointError: if there is no such tensor or box, or dtype or shape differ.
        """
        stored = self.manifest.tensor(kind, name)
        if dtype_name(tensor.dtype) != stored.dtype:
            raise self._unfit(stored, f"has dtype {stored.dtype}, {dtype_name(tensor.dtype)} is wanted")
        if offset is None and tuple(tensor.shape) != stored.shape:
            raise self._unfit(stored, f"has shape {list(stored.shape)}, {list(tensor.shape)} is wanted")
        box = self._box(stored, tuple(offset or (0,) * len(stored.shape)), tuple(tensor.shape))
        with torch.no_grad():
            self._fill(stored, box, tensor)

    def stored_rows(self, kind: str, name: str, low: int, high: int, filler: Filler) -> Tensor | None:
        """Which of a tensor's rows from `low` to `high` are stored, where all others hold what `filler` says.

        Returns:
            Their numbers, int64, ascending; None if that is not how the tensor was saved.
        """
        found = []
        for at in self.manifest.tensor(kind, name).boxes:
            if at.box.volume and at.box.offset[0] < high and low < at.box.offset[0] + at.box.length[0]:
                if at.rows is None or at.rows.filler != filler:
                    return None
                found.append(self._row_numbers(at, at.rows))
        rows = torch.cat(found).sort().values if found else torch.empty(0, dtype=torch.int64)
        return rows[(rows >= low) & (rows < high)]

    def gather(self, kind: str, name: str, rows: Tensor) -> Tensor:
        """Some rows of a tensor, [len(rows), …].

        Args:
            kind: of the tensor.
            name: its global name.
            rows: int64, ascending, each once.

        Raises:
            CheckpointError: if there is no such tensor or row, or the file holds something else.
        """
        stored = self.manifest.tensor(kind, name)
        values = torch.empty((len(rows), *stored.shape[1:]), dtype=_dtype(stored.dtype))
        if not len(rows):
            return values
        self._box(stored, (int(rows[0]), *[0] * len(stored.shape[1:])), (1, *stored.shape[1:]))
        self._box(stored, (int(rows[-1]), *[0] * len(stored.shape[1:])), (1, *stored.shape[1:]))
        for at in stored.boxes:
            if not at.box.volume:
                continue
            ends = torch.tensor([at.box.offset[0], at.box.offset[0] + at.box.length[0]])
            low, high = torch.searchsorted(rows, ends).tolist()
            if low == high:
                continue
            own = rows[low:high]
            columns = tuple(slice(a, a + n) for a, n in zip(at.box.offset[1:], at.box.length[1:], strict=True))
            if at.rows is not None:
                values[low:high] = self._rows(stored, at, at.rows, own)
                continue
            first, last = int(own[0]), int(own[-1]) + 1
            box = Box((first, *at.box.offset[1:]), (last - first, *at.box.length[1:]))
            values[(slice(low, high), *columns)] = self._stored(stored, at, box)[own - first]
        return values

    def close(self) -> None:
        """Gives the mapped files back."""
        for name in list(self._open):
            self._open.pop(name).__exit__(None, None, None)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _box(self, stored: StoredTensor, offset: tuple[int, ...], length: tuple[int, ...]) -> Box:
        box = Box(offset, length)
        if not box.inside(stored.shape):
            raise self._unfit(stored, f"has shape {list(stored.shape)}, at {list(offset)} {list(length)} is wanted")
        return box

    def _fill(self, stored: StoredTensor, box: Box, values: Tensor) -> None:
        for at in stored.boxes:
            common = box.overlap(at.box) if at.box.volume else None
            if common is not None and common.volume:
                target = values[common.within(box)] if box.length else values
                if at.rows is None:
                    target.copy_(self._stored(stored, at, common))
                    continue
                columns = tuple(slice(a, a + n) for a, n in zip(common.offset[1:], common.length[1:], strict=True))
                for low in range(0, common.length[0], _RUN):
                    high = min(low + _RUN, common.length[0])
                    rows = torch.arange(common.offset[0] + low, common.offset[0] + high)
                    target[low:high] = self._rows(stored, at, at.rows, rows)[(slice(None), *columns)]

    def _rows(self, stored: StoredTensor, at: StoredBox, rows: StoredRows, wanted: Tensor) -> Tensor:
        """Whole rows of a sparse box, ascending."""
        dtype, shape = _dtype(stored.dtype), (len(wanted), *stored.shape[1:])
        numbers = self._row_numbers(at, rows)
        low, high = torch.searchsorted(numbers, torch.stack([wanted[0], wanted[-1] + 1])).tolist()
        places = torch.searchsorted(numbers[low:high], wanted)
        here = places < high - low
        here[here.clone()] = numbers[low:high][places[here]] == wanted[here]
        values = torch.full(shape, rows.filler.value, dtype=dtype)
        if rows.filler.born is not None:
            seed, scale = rows.filler.born
            width = math.prod(shape[1:])
            values[~here] = born(seed, wanted[~here], width, scale).to(dtype).view(-1, *shape[1:])
        if high > low:
            box = Box((low, *at.box.offset[1:]), (high - low, *at.box.length[1:]))
            whole = Box((0, *at.box.offset[1:]), (rows.count, *at.box.length[1:]))
            values[here] = self._part(stored, at.file, at.key, box, whole)[places[here]]
        return values

    def _row_numbers(self, at: StoredBox, rows: StoredRows) -> Tensor:
        """Which rows of a sparse box are stored."""
        if not rows.count:
            return torch.empty(0, dtype=torch.int64)
        path = self.manifest.folder / at.file
        try:
            numbers: Tensor = self._file(at.file).get_tensor(rows.key)
        except (SafetensorError, OSError) as error:
            raise self._damaged(path, f"`{rows.key}` cannot be read: {error}") from None
        low = at.box.offset[0]
        fits = numbers.dtype == torch.int64 and tuple(numbers.shape) == (rows.count,)
        if not fits or numbers[0] < low or numbers[-1] >= low + at.box.length[0] or (numbers.diff() <= 0).any():
            raise self._damaged(path, f"`{rows.key}` does not have the numbers of rows that the manifest says")
        return numbers

    def _stored(self, stored: StoredTensor, at: StoredBox, common: Box) -> Tensor:
        return self._part(stored, at.file, at.key, common, at.box)

    def _part(self, stored: StoredTensor, name: str, key: str, box: Box, outer: Box) -> Tensor:
        """What of `box` lies under a key that holds `outer`."""
        path = self.manifest.folder / name
        try:
            file = self._file(name)
            part = file.get_slice(key)
            if tuple(part.get_shape()) != outer.length or part.get_dtype() != DTYPES[stored.dtype][0]:
                raise self._damaged(path, f"`{key}` has another shape or dtype than the manifest says")
            values: Tensor = file.get_tensor(key) if box == outer else part[box.within(outer)]
        except (SafetensorError, OSError) as error:
            raise self._damaged(path, f"`{key}` cannot be read: {error}") from None
        return values

    def _file(self, name: str) -> Any:
        file = self._open.get(name)
        if file is None:
            if len(self._open) >= _OPEN_FILES:
                self._open.pop(next(iter(self._open))).__exit__(None, None, None)
            path = self.manifest.folder / name
            file = safe_open(path, framework="pt", device="cpu") if isinstance(path, Path) else RemoteShard(path)
            self._open[name] = file
        return file

    def _unfit(self, stored: StoredTensor, what: str) -> CheckpointError:
        return CheckpointError(
            f"{stored.kind} `{stored.name}` {what}",
            where=str(self.manifest.folder),
            fix="The model or optimiser is not the one that was saved",
        )

    def _damaged(self, path: Location, what: str) -> CheckpointError:
        return CheckpointError(what, where=str(path), fix="This checkpoint is damaged; take an earlier one")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)  # `name` is one of DTYPES
    assert isinstance(dtype, torch.dtype)
    return dtype
