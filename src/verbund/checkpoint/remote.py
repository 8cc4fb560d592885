"""A safetensors file at the run's owner: its header is read, and then of its tensors the boxes that are asked for.

Offers what `safetensors.safe_open` does, as far as a checkpoint needs it.
"""

from __future__ import annotations

import itertools
import json
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from verbund.checkpoint.manifest import DTYPES
from verbund.comm.files import Bytes, Remote
from verbund.comm.wire import Call

_HEADER_LIMIT = 100 << 20
"""Bytes, as the library has it."""
_BOX_BYTES = 8 << 20
"""Of a tensor that travel in one message."""
_NAMES = {code: name for name, (code, _) in DTYPES.items()}


@dataclass(frozen=True)
class _Stored:
    dtype: str
    shape: tuple[int, ...]
    at: int
    """Its first byte in the file."""


class RemoteShard:
    """One file.

    Args:
        file: where it lies.

    Raises:
        SafetensorError: if it is none.
        VerbundError: if it cannot be read.
    """

    def __init__(self, file: Remote) -> None:
        self._file = file
        head = file.read(8)
        size = struct.unpack("<Q", head)[0] if len(head) == 8 else _HEADER_LIMIT + 1
        if size > _HEADER_LIMIT:
            raise SafetensorError("it has no header")
        try:
            described = json.loads(file.read(size, 8))
            described.pop("__metadata__", None)
            self._tensors = {key: _stored(item, 8 + size) for key, item in described.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise SafetensorError(f"its header is damaged: {error}") from None

    def keys(self) -> list[str]:
        """What it holds."""
        return [*self._tensors]

    def get_slice(self, key: str) -> RemoteTensor:
        """A tensor of which nothing has been read yet."""
        if key not in self._tensors:
            raise SafetensorError(f"it does not hold `{key}`")
        return RemoteTensor(self._file, self._tensors[key])

    def get_tensor(self, key: str) -> Tensor:
        """A whole tensor."""
        return self.get_slice(key)[()]

    def __exit__(self, *_: object) -> None:
        """Nothing to give back."""


class RemoteTensor:
    """A tensor in such a file; boxes of it are read when they are asked for."""

    def __init__(self, file: Remote, stored: _Stored) -> None:
        self._file, self._stored = file, stored

    def get_shape(self) -> list[int]:
        return list(self._stored.shape)

    def get_dtype(self) -> str:
        return self._stored.dtype

    def __getitem__(self, box: tuple[slice, ...]) -> Tensor:
        """The values in a box, one slice for each of its first dimensions; only these travel."""
        stored = self._stored
        slices = (*box, *(slice(None) for _ in stored.shape[len(box) :]))
        bounds = [one.indices(size)[:2] for one, size in zip(slices, stored.shape, strict=True)]
        offset, length = [low for low, _ in bounds], [high - low for low, high in bounds]
        name = _NAMES[stored.dtype]
        values = torch.empty(length, dtype=getattr(torch, name))
        if not values.numel():
            return values
        flat: Bytes = values.view(-1).view(torch.uint8).numpy()
        line, width = self._file.line, DTYPES[name][1]

        def starts() -> Iterator[Callable[[], Call]]:
            done = 0
            for begin, many in _parts(length, width):
                into = flat[done : done + width * math.prod(many)]
                where = [low + more for low, more in zip(offset, begin, strict=True)], many
                done += len(into)
                yield _start(self._file, stored, width, where, into)

        line.each(starts())
        return values


def _start(
    file: Remote, stored: _Stored, width: int, box: tuple[list[int], list[int]], into: Bytes
) -> Callable[[], Call]:
    return lambda: file.read_box(stored.at, stored.shape, width, box, into)


def _parts(length: Sequence[int], width: int) -> Iterator[tuple[list[int], list[int]]]:
    """A box in parts of at most `_BOX_BYTES`, each of which lies in one run of the box's values: offset and length."""
    dims = len(length)
    cut = next((dim for dim in range(dims) if width * math.prod(length[dim + 1 :]) <= _BOX_BYTES), dims)
    if cut == dims:  # a single number
        yield [0] * dims, list(length)
        return
    rows = max(1, _BOX_BYTES // max(1, width * math.prod(length[cut + 1 :])))
    for outer in itertools.product(*(range(size) for size in length[:cut])):
        for low in range(0, length[cut], rows):
            many = min(rows, length[cut] - low)
            yield [*outer, low, *[0] * (dims - cut - 1)], [*[1] * cut, many, *length[cut + 1 :]]


def _stored(item: Any, begin: int) -> _Stored:
    dtype, shape = str(item["dtype"]), tuple(int(size) for size in item["shape"])
    low, high = item["data_offsets"]
    if min((*shape, low)) < 0 or high - low != DTYPES[_NAMES[dtype]][1] * math.prod(shape):
        raise ValueError("a tensor has another size than its shape says")
    return _Stored(dtype, shape, begin + low)
