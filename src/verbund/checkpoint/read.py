"""The reading side of a checkpoint: any box of any tensor, however it was cut when it was saved."""

from __future__ import annotations

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
from verbund.errors import CheckpointError

_OPEN_FILES = 32


class Checkpoint:
    """A saved state of a run. Reads boxes from mapped files; never the whole model.

    Use it as a context manager, or `close` it, to give the mapped files back.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._open: dict[str, Any] = {}

    @staticmethod
    def open(path: Path, verify: bool = True) -> Checkpoint:
        """Opens a checkpoint's folder.

        Args:
            path: the folder.
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
                target.copy_(self._stored(stored, at, common))

    def _stored(self, stored: StoredTensor, at: StoredBox, common: Box) -> Tensor:
        path = self.manifest.folder / at.file
        try:
            file = self._file(at.file)
            part = file.get_slice(at.key)
            if tuple(part.get_shape()) != at.box.length or part.get_dtype() != DTYPES[stored.dtype][0]:
                raise self._damaged(path, f"`{at.key}` has another shape or dtype than the manifest says")
            whole = common == at.box
            values: Tensor = file.get_tensor(at.key) if whole else part[common.within(at.box)]
        except (SafetensorError, OSError) as error:
            raise self._damaged(path, f"`{at.key}` cannot be read: {error}") from None
        return values

    def _file(self, name: str) -> Any:
        file = self._open.get(name)
        if file is None:
            if len(self._open) >= _OPEN_FILES:
                self._open.pop(next(iter(self._open))).__exit__(None, None, None)
            file = safe_open(self.manifest.folder / name, framework="pt", device="cpu")
            self._open[name] = file
        return file

    def _unfit(self, stored: StoredTensor, what: str) -> CheckpointError:
        return CheckpointError(
            f"{stored.kind} `{stored.name}` {what}",
            where=str(self.manifest.folder),
            fix="The model or optimiser is not the one that was saved",
        )

    def _damaged(self, path: Path, what: str) -> CheckpointError:
        return CheckpointError(what, where=str(path), fix="This checkpoint is damaged; take an earlier one")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)  # `name` is one of DTYPES
    assert isinstance(dtype, torch.dtype)
    return dtype
