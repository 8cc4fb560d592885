"""Frames: what a message is made of on the wire.

    magic  u32   0x56424E44 ("VBND")
    header u32   length of the header in bytes, at most HEADER_LIMIT
    body   u64   length of the body in bytes, at most the connection's limit
    check  u64   XXH3-64 of header and body

The header is a JSON object: `kind` (what the message is), `arrays` (name, dtype, shape of each array in the
body, in order) and the message's own `fields`. Arrays are little-endian and C-contiguous; `bits:B` are whole numbers
of B bits each (`bits`). Lengths are checked before anything is allocated; nothing is ever unpickled.
"""

from __future__ import annotations

import functools
import json
import math
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from verbund.comm.wire import bits
from verbund.comm.wire.bits import Bits
from verbund.comm.wire.failure import WireError

if TYPE_CHECKING:
    from torch import Tensor

MAGIC = 0x56424E44
HEADER_LIMIT = 1 << 24
BODY_LIMIT = 1 << 32
PREFIX = struct.Struct("<IIQQ")
_DIMENSIONS = 32
DTYPES = frozenset(
    (
        "bool",
        "uint8",
        "int8",
        "uint16",
        "int16",
        "uint32",
        "int32",
        "uint64",
        "int64",
        "float16",
        "float32",
        "float64",
    )
)
BFLOAT16 = "bfloat16"
_BITS = {f"bits:{width}": width for width in range(1, bits.WIDEST + 1)}

Array = NDArray[Any]
Payload: TypeAlias = "Array | Bits | Tensor"
"""What travels as an array: of numpy, a torch tensor in the host's memory, or packed numbers."""
Place: TypeAlias = "Array | Tensor"
"""Where an array is received to: contiguous, and of the shape and dtype that comes."""


@dataclass(frozen=True)
class Message:
    """What travels: `kind` and `fields` are plain JSON values, `arrays` are raw.

    What numpy has no type for arrives as the next larger one: bfloat16 as float32, packed numbers as unsigned integers.
    What was received into a given place is not among `arrays`; `placed` has its name.
    """

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, Array] = field(default_factory=dict)
    placed: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Described:
    """An array as a header describes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        """Bytes on the wire."""
        if width := _BITS.get(self.dtype):
            return bits.packed_size(self.count, width)
        return self.count * (2 if self.dtype == BFLOAT16 else np.dtype(self.dtype).itemsize)

    @property
    def plain(self) -> np.dtype[Any]:
        """numpy's type for it."""
        if width := _BITS.get(self.dtype):
            return bits.dtype(width)
        return np.dtype("<f4" if self.dtype == BFLOAT16 else self.dtype).newbyteorder("<")

    @property
    def packed(self) -> bool:
        """Whether it is received as bytes and then unpacked, even where a place is given."""
        return self.dtype in _BITS

    def place(self, target: Place) -> Array:
        """A given place as an array of numpy that has this array's shape, and its dtype unless it is packed numbers.

        Raises:
            WireError: if the place is of another shape or type.
        """
        held, view = _plain(target)
        numbers = self.dtype in _BITS and view.dtype.kind == "u" and view.itemsize >= self.plain.itemsize
        if view.shape != self.shape or not view.dtype.isnative or (held != self.dtype and not numbers):
            raise WireError(f"array {self.name} is {self.dtype} {list(self.shape)}, not {held} {list(view.shape)}")
        if not (view.flags.c_contiguous and view.flags.writeable):
            raise ValueError(f"the place for array {self.name} is not contiguous and writable")
        return view

    def allocate(self, take: Callable[[int], Array] | None = None) -> Array:
        """Memory for what arrives; `take` gives so many bytes."""
        if self.packed or self.dtype == BFLOAT16:
            return np.empty(self.size, np.uint8)
        if take is None:
            return np.empty(self.shape, self.plain)
        return take(self.size).view(self.plain).reshape(self.shape)

    def finish(self, raw: Array, place: Array | None) -> Array:
        """Makes an array of what arrived, and checks it.

        Args:
            raw: the place itself, or what `allocate` gave.
            place: where the array is to be, if that was said.

        Raises:
            WireError: if packed numbers or truth values are none.
        """
        if self.dtype == "bool" and raw.size and raw.view(np.uint8).max() > 1:
            raise WireError(f"array {self.name} is of bool and holds other bytes than 0 and 1")
        if raw is place or not (self.packed or self.dtype == BFLOAT16):
            return raw
        values = np.empty(self.shape, self.plain) if place is None else place
        if self.packed:
            try:
                bits.unpack(raw, _BITS[self.dtype], values.reshape(-1))
            except ValueError as error:
                raise WireError(f"array {self.name}: {error}") from None
        else:
            whole = values.reshape(-1).view(np.uint32)
            whole[:] = raw.view("<u2")
            whole <<= np.uint32(16)
        return values


def encode(
    kind: str, fields: Mapping[str, Any] | None, arrays: Mapping[str, Payload]
) -> tuple[bytes, list[memoryview]]:
    """A message's header, and its body in parts.

    Raises:
        ValueError: if an array's dtype cannot travel.
    """
    described = []
    body = []
    for name, array in arrays.items():
        dtype, shape, raw = _raw(array)
        if len(shape) > _DIMENSIONS:
            raise ValueError(f"an array of {len(shape)} dimensions does not travel")
        described.append([name, dtype, shape])
        body.append(raw.reshape(-1).view(np.uint8).data if raw.size else memoryview(b""))
    header = json.dumps({"kind": kind, "fields": dict(fields or {}), "arrays": described}).encode()
    return header, body


def _raw(array: Payload) -> tuple[str, list[int], Array]:
    if isinstance(array, Bits):
        return f"bits:{array.width}", list(array.values.shape), bits.pack(array.values, array.width)
    dtype, plain = _plain(array)
    return dtype, list(plain.shape), np.ascontiguousarray(plain, dtype=plain.dtype.newbyteorder("<"))


@functools.cache
def _name(dtype: Any) -> str:
    return dtype.name if isinstance(dtype, np.dtype) else str(dtype).removeprefix("torch.")


def _plain(array: Array | Tensor) -> tuple[str, Array]:
    """The name of an array's dtype on the wire, and its memory as an array of numpy: bfloat16 as int16."""
    name = _name(array.dtype)
    if name not in DTYPES and (name != BFLOAT16 or isinstance(array, np.ndarray)):
        raise ValueError(f"an array of type {name} does not travel")
    if isinstance(array, np.ndarray):
        return name, array
    if array.device.type != "cpu":
        raise ValueError("a tensor that is not in the host's memory does not travel")
    torch = sys.modules["torch"]  # whoever has a tensor has imported it; who has none need not
    return name, (array.detach().view(torch.int16) if name == BFLOAT16 else array.detach()).numpy()


def decode(raw: bytearray, body_size: int, limit: int) -> tuple[str, dict[str, Any], list[Described]]:
    """Checks a header against its types and the body's length before anything is allocated."""
    try:
        header = json.loads(raw.decode())
        kind, fields, described = header["kind"], header["fields"], header["arrays"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise WireError(f"a header is not of this protocol: {error}") from None
    if not isinstance(kind, str) or not isinstance(fields, dict) or not isinstance(described, list):
        raise WireError("a header has fields of the wrong types")
    arrays = [_described(item) for item in described]
    if len({array.name for array in arrays}) < len(arrays):
        raise WireError("two arrays have one name")
    if (expected := sum(array.size for array in arrays)) != body_size:
        raise WireError(f"arrays of {expected} bytes are described, {body_size} follow")
    if (unpacked := sum(array.count * array.plain.itemsize for array in arrays)) > limit:
        raise WireError(f"arrays of {unpacked} bytes are over the limit")
    return kind, fields, arrays


def _described(item: Any) -> Described:
    if not (isinstance(item, list) and len(item) == 3):
        raise WireError("an array is not described as name, dtype, shape")
    name, dtype, shape = item
    known = isinstance(dtype, str) and (dtype in DTYPES or dtype in _BITS or dtype == BFLOAT16)
    if not isinstance(name, str) or not known:
        raise WireError("an array has no name or no known dtype")
    if (
        not isinstance(shape, list)
        or len(shape) > _DIMENSIONS
        or not all(type(n) is int and 0 <= n < 1 << 48 for n in shape)
    ):
        raise WireError("an array's shape is not a list of sizes")
    array = Described(name, dtype, tuple(shape))
    if math.prod(max(n, 1) for n in shape) * array.plain.itemsize >= 1 << 63:  # of an empty one too: numpy refuses it
        raise WireError("an array's shape is too large")
    return array
