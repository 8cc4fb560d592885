"""Frames: what a message is made of on the wire.

    magic  u32   0x56424E44 ("VBND")
    header u32   length of the header in bytes, at most HEADER_LIMIT
    body   u64   length of the body in bytes, at most the connection's limit
    crc    u32   CRC-32 of header and body

The header is a JSON object: `kind` (what the message is), `arrays` (name, dtype, shape of each array in the
body, in order) and the message's own `fields`. Arrays are little-endian and C-contiguous. Lengths are checked
before anything is allocated; nothing is ever unpickled.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verbund.comm.wire.failure import WireError

MAGIC = 0x56424E44
HEADER_LIMIT = 1 << 24
BODY_LIMIT = 1 << 32
PREFIX = struct.Struct("<IIQI")
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

Array = NDArray[Any]


@dataclass(frozen=True)
class Message:
    """What travels: `kind` and `fields` are plain JSON values, `arrays` are raw."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, Array] = field(default_factory=dict)


def encode(kind: str, fields: Mapping[str, Any] | None, arrays: Mapping[str, Array]) -> tuple[bytes, list[memoryview]]:
    """A message's header, and its body in parts.

    Raises:
        ValueError: if an array's dtype cannot travel.
    """
    described = []
    body = []
    for name, array in arrays.items():
        if array.dtype.name not in DTYPES or array.ndim > _DIMENSIONS:
            raise ValueError(f"an array of type {array.dtype} and {array.ndim} dimensions does not travel")
        described.append([name, array.dtype.name, list(array.shape)])
        little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        body.append(little.reshape(-1).view(np.uint8).data if array.size else memoryview(b""))
    header = json.dumps({"kind": kind, "fields": dict(fields or {}), "arrays": described}).encode()
    return header, body


def decode(raw: bytearray, body_size: int) -> tuple[str, dict[str, Any], list[tuple[str, str, list[int]]]]:
    """Checks a header against its types and the body's length before anything is allocated."""
    try:
        header = json.loads(raw.decode())
        kind, fields, described = header["kind"], header["fields"], header["arrays"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise WireError(f"a header is not of this protocol: {error}") from None
    if not isinstance(kind, str) or not isinstance(fields, dict) or not isinstance(described, list):
        raise WireError("a header has fields of the wrong types")
    arrays = []
    names = set()
    expected = 0
    for item in described:
        if not (isinstance(item, list) and len(item) == 3):
            raise WireError("an array is not described as name, dtype, shape")
        name, dtype, shape = item
        if not isinstance(name, str) or not isinstance(dtype, str) or dtype not in DTYPES:
            raise WireError("an array has no name or no known dtype")
        if name in names:
            raise WireError("two arrays have one name")
        names.add(name)
        if (
            not isinstance(shape, list)
            or len(shape) > _DIMENSIONS
            or not all(type(n) is int and 0 <= n < 1 << 48 for n in shape)
        ):
            raise WireError("an array's shape is not a list of sizes")
        itemsize = np.dtype(dtype).itemsize
        if math.prod(max(n, 1) for n in shape) * itemsize >= 1 << 63:  # of an empty array too: numpy refuses it
            raise WireError("an array's shape is too large")
        expected += math.prod(shape) * itemsize
        arrays.append((name, dtype, shape))
    if expected != body_size:
        raise WireError(f"arrays of {expected} bytes are described, {body_size} follow")
    return kind, fields, arrays
