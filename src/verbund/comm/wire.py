"""The wire: framed messages over a connected stream socket.

A frame is a fixed prefix, a JSON header and raw array bytes:

    magic  u32   0x56424E44 ("VBND")
    header u32   length of the header in bytes, at most HEADER_LIMIT
    body   u64   length of the body in bytes, at most the connection's limit
    crc    u32   CRC-32 of header and body

The header is a JSON object: `kind` (what the message is), `arrays` (name, dtype, shape of each array in the body, in
order) and the message's own fields. Lengths are checked before anything is allocated; nothing is ever unpickled.
"""

from __future__ import annotations

import json
import math
import select
import socket
import struct
import threading
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAGIC = 0x56424E44
HEADER_LIMIT = 1 << 20
BODY_LIMIT = 1 << 32
_PREFIX = struct.Struct("<IIQI")
_DTYPES = frozenset(
    ("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float64")
)

Array = NDArray[Any]


class WireError(Exception):
    """The peer sent what is no frame of ours, or more than is allowed; the connection is of no further use."""


class Closed(WireError):
    """The peer closed the connection."""


class Deadline(WireError):
    """Nothing, or not everything, arrived in time."""


@dataclass(frozen=True)
class Message:
    """What travels: `kind` and `fields` are plain JSON values, `arrays` are raw."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, Array] = field(default_factory=dict)


class Connection:
    """Sends and receives messages over one connected socket. Sending is safe from several threads.

    Args:
        sock: a connected stream socket (Unix or TCP); the connection owns it from now on.
        body_limit: bytes of arrays that one message may carry.
    """

    def __init__(self, sock: socket.socket, body_limit: int = BODY_LIMIT) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._body_limit = body_limit
        self._sending = threading.Lock()

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, kind: str, fields: Mapping[str, Any] | None = None, **arrays: Array) -> None:
        """Sends one message whole.

        Raises:
            Closed: if the peer is gone.
            WireError: if the header is over its limit or a dtype cannot travel.
        """
        described = []
        body = []
        for name, array in arrays.items():
            if array.dtype.name not in _DTYPES:
                raise WireError(f"arrays of type {array.dtype} do not travel")
            described.append([name, array.dtype.name, list(array.shape)])
            body.append(memoryview(np.ascontiguousarray(array)).cast("B") if array.size else memoryview(b""))
        header = json.dumps({"kind": kind, "fields": dict(fields or {}), "arrays": described}).encode()
        if len(header) > HEADER_LIMIT:
            raise WireError(f"a header of {len(header)} bytes is over the limit of {HEADER_LIMIT}")
        crc = zlib.crc32(header)
        for part in body:
            crc = zlib.crc32(part, crc)
        size = sum(len(part) for part in body)
        with self._sending:
            try:
                self._sock.sendall(_PREFIX.pack(MAGIC, len(header), size, crc) + header)
                for part in body:
                    self._sock.sendall(part)
            except OSError as error:
                raise Closed(f"the peer is gone: {error}") from None

    def receive(self, timeout: float | None = None) -> Message:
        """The next message.

        Args:
            timeout: seconds until the whole message must have arrived; None waits for ever and is for threads whose
                peer's death closes the socket.

        Raises:
            Deadline: if `timeout` passed.
            Closed: if the peer closed the connection between two messages or within one.
            WireError: if what came is damaged or over a limit.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        prefix = bytearray(_PREFIX.size)
        self._fill(memoryview(prefix), deadline)
        magic, header_size, body_size, crc = _PREFIX.unpack(prefix)
        if magic != MAGIC:
            raise WireError("the peer does not speak this protocol")
        if header_size > HEADER_LIMIT or body_size > self._body_limit:
            raise WireError(f"a frame of {header_size} + {body_size} bytes is over the limit of {self._body_limit}")
        header = bytearray(header_size)
        self._fill(memoryview(header), deadline)
        kind, fields, described = _header(header, body_size)
        seen = zlib.crc32(header)
        arrays = {}
        for name, dtype, shape in described:
            array: Array = np.empty(shape, dtype)
            if array.size:
                view = memoryview(array.reshape(-1)).cast("B")
                self._fill(view, deadline)
                seen = zlib.crc32(view, seen)
            arrays[name] = array
        if seen != crc:
            raise WireError("a frame arrived damaged (CRC)")
        return Message(kind, fields, arrays)

    def ready(self, timeout: float = 0.0) -> bool:
        """Whether something can be received within `timeout` seconds."""
        return bool(select.select([self._sock], [], [], timeout)[0])

    def close(self) -> None:
        self._sock.close()

    def _fill(self, view: memoryview, deadline: float | None) -> None:
        while view.nbytes:
            if deadline is not None:
                left = deadline - time.monotonic()
                if left <= 0 or not select.select([self._sock], [], [], left)[0]:
                    raise Deadline("nothing arrived in time")
            try:
                count = self._sock.recv_into(view)
            except OSError as error:
                raise Closed(f"the peer is gone: {error}") from None
            if count == 0:
                raise Closed("the peer closed the connection")
            view = view[count:]


def _header(raw: bytearray, body_size: int) -> tuple[str, dict[str, Any], list[tuple[str, str, list[int]]]]:
    """Checks a header against its types and the body's length before anything is allocated."""
    try:
        header = json.loads(raw.decode())
        kind, fields, described = header["kind"], header["fields"], header["arrays"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise WireError(f"a header is not of this protocol: {error}") from None
    if not isinstance(kind, str) or not isinstance(fields, dict) or not isinstance(described, list):
        raise WireError("a header has fields of the wrong types")
    arrays = []
    expected = 0
    for item in described:
        if not (isinstance(item, list) and len(item) == 3):
            raise WireError("an array is not described as name, dtype, shape")
        name, dtype, shape = item
        if not isinstance(name, str) or not isinstance(dtype, str) or dtype not in _DTYPES:
            raise WireError("an array has no name or no known dtype")
        if not isinstance(shape, list) or not all(type(n) is int and 0 <= n < 1 << 48 for n in shape):
            raise WireError("an array's shape is not a list of sizes")
        expected += math.prod(shape) * np.dtype(dtype).itemsize
        arrays.append((name, dtype, shape))
    if expected != body_size:
        raise WireError(f"arrays of {expected} bytes are described, {body_size} follow")
    return kind, fields, arrays
