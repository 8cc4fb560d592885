"""Samples in a worker: random access by id over column files, with numpy alone."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verbund.data.images import decode
from verbund.data.manifest import FILES, Manifest
from verbund.data.split import Selection
from verbund.errors import DataError

Ids = NDArray[np.int64]
Rows = dict[str, NDArray[Any]]


class Source(ABC):
    """Samples with ids 0 … size − 1."""

    size: int
    block: int = 1
    slow: bool = False
    """Whether reading is worth a thread or process of its own."""

    @abstractmethod
    def rows(self, ids: Ids, ticket: int | None = None) -> Rows:
        """The samples' columns, dimension 0 being the sample.

        Args:
            ids: shape [k].
            ticket: keys randomness that the source itself draws; None: it must not draw any for training.
        """


class Samples:
    """A source, or the part of it that is trained on or validated with.

    Args:
        source: where the samples are.
        selection: which of them; None: all.
    """

    def __init__(self, source: Source, selection: Selection | None = None) -> None:
        self.source = source
        self._selection = selection

    def __len__(self) -> int:
        return self.source.size if self._selection is None else len(self._selection)

    @property
    def block(self) -> int:
        """Samples that lie together in the source."""
        return self.source.block

    def ids(self, positions: Ids) -> Ids:
        """The sample ids at positions 0 … len − 1."""
        return positions if self._selection is None else self._selection.select(positions)


class ColumnFiles(Source):
    """A store of memory-mapped columns.

    Args:
        folder: the store.
        columns: those that are read; None: all.
        roots: where images lie of folders that this host does not see.
    """

    def __init__(
        self, folder: Path, columns: Sequence[str] | None = None, roots: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        manifest = Manifest.read(folder)
        self.size = manifest.rows
        self.block = manifest.block
        # A store with blocks is too large to lie in memory: a read may wait for the disk.
        self.slow = manifest.kind == "images" or manifest.block > 1
        self._arrays: Rows = {}
        self._images: _Images | None = None
        for column in manifest.columns:
            if columns is not None and column.name not in columns:
                continue
            if column.file is None:
                self._images = _Images(folder, manifest, roots)
                continue
            array: NDArray[Any] = np.memmap(folder / column.file, column.dtype, "r")
            if manifest.kind == "tokens":
                assert manifest.sequence is not None
                windows = np.lib.stride_tricks.sliding_window_view(array, manifest.sequence + 1)
                self._arrays[column.name] = windows[:: manifest.sequence][: self.size]
            else:
                array = array[: self.size * max(int(np.prod(column.shape)), 1)]
                self._arrays[column.name] = array.view(np.ndarray).reshape(self.size, *column.shape)

    @property
    def files(self) -> list[str] | None:
        """The file of each sample, where each has one."""
        return self._images.files if self._images is not None else None

    def rows(self, ids: Ids, ticket: int | None = None) -> Rows:
        rows = {name: array[ids] for name, array in self._arrays.items()}
        if self._images is not None:
            rows["image"] = self._images.read(ids)
        return rows


class _Images:
    """The images of a store, decoded one by one."""

    def __init__(self, folder: Path, manifest: Manifest, roots: Mapping[str, str]) -> None:
        column = manifest.column("image")
        assert manifest.root is not None
        assert column is not None
        self._root = Path(roots.get(manifest.root, manifest.root))
        self.files: list[str] = json.loads((folder / FILES).read_text(encoding="utf-8"))
        self._shape = column.shape
        self._size = (column.shape[1], column.shape[2])

    def read(self, ids: Ids) -> NDArray[np.uint8]:
        result = np.empty((len(ids), *self._shape), np.uint8)
        for row, number in enumerate(ids.tolist()):
            path = self._root / self.files[number]
            if not path.is_file():
                raise DataError("an image that was there at the start is gone", where=str(path))
            result[row] = decode(path, self._size, self._shape)
        return result
