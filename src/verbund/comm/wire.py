"""The wire: framed messages over a connected stream socket.

A frame is a fixed prefix, a JSON header and raw array bytes:

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
HEADER_LIMIT = 1 << 24
BODY_LIMIT = 1 << 32
STALL_SECONDS = 60.0
_DIMENSIONS = 32
_LONGEST_POLL = 86400.0
_PREFIX = struct.Struct("<IIQI")
_DTYPES = frozenset(
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


class WireError(Exception):
    """The peer sent what is no frame of ours, or too much; the connection is of no further use."""


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
        header_limit: bytes of kind, fields and descriptions that one message may carry.
        stall: seconds that the peer may take nothing of what is sent before it counts as gone.
    """

    def __init__(
        self,
        sock: socket.socket,
        body_limit: int = BODY_LIMIT,
        header_limit: int = HEADER_LIMIT,
        stall: float = STALL_SECONDS,
    ) -> None:
        sock.setblocking(True)
        # The kernel's own limit: Python's would hold for receiving too, which has deadlines of its own.
        limit = struct.pack("@ll", int(stall), int(stall % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self._sock = sock
        self._body_limit = body_limit
        self._header_limit = header_limit
        self._stall = stall
        self._sending = threading.Lock()
        self._torn = [False, False]  # whether a frame was left half-sent, half-received

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, kind: str, fields: Mapping[str, Any] | None = None, **arrays: Array) -> None:
        """Sends one message whole.

        Raises:
            Closed: if the peer is gone, or took nothing for `stall` seconds.
            ValueError: if header or body is over its limit or a dtype cannot travel. Nothing was sent, and
                the connection is as good as before.
        """
        described = []
        body = []
        for name, array in arrays.items():
            if array.dtype.name not in _DTYPES or array.ndim > _DIMENSIONS:
                raise ValueError(f"an array of type {array.dtype} and {array.ndim} dimensions does not travel")
            described.append([name, array.dtype.name, list(array.shape)])
            little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
            body.append(little.reshape(-1).view(np.uint8).data if array.size else memoryview(b""))
        header = json.dumps({"kind": kind, "fields": dict(fields or {}), "arrays": described}).encode()
        size = sum(len(part) for part in body)
        for what, count, limit in (
            ("header", len(header), self._header_limit),
            ("body", size, self._body_limit),
        ):
            if count > limit:
                raise ValueError(f"the message `{kind}` has a {what} of {count} bytes, over the limit of {limit}")
        crc = zlib.crc32(header)
        for part in body:
            crc = zlib.crc32(part, crc)
        with self._sending:
            if self._torn[0]:
                raise Closed("the peer is gone: a message to it was left half-sent")
            self._torn[0] = True
            try:
                self._sock.sendall(_PREFIX.pack(MAGIC, len(header), size, crc) + header)
                for part in body:
                    self._sock.sendall(part)
            except BlockingIOError:
                raise Closed(f"the peer is gone: it took nothing for {self._stall:g} s") from None
            except OSError as error:
                raise Closed(f"the peer is gone: {error}") from None
            self._torn[0] = False

    def receive(self, timeout: float | None = None) -> Message:
        """The next message.

        Args:
            timeout: seconds until the whole message must have arrived; None waits for ever and is for threads
                whose peer's death closes the socket.

        Raises:
            Deadline: if `timeout` passed. If part of a message had come, the connection is of no further use.
            Closed: if the peer closed the connection between two messages or within one.
            WireError: if what came is damaged or over a limit.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        if self._torn[1]:
            raise WireError("a message of the peer was left half-read")
        prefix = bytearray(_PREFIX.size)
        self._fill(memoryview(prefix), deadline)
        magic, header_size, body_size, crc = _PREFIX.unpack(prefix)
        if magic != MAGIC:
            raise WireError("the peer does not speak this protocol")
        if header_size > self._header_limit or body_size > self._body_limit:
            raise WireError(f"a frame of {header_size} + {body_size} bytes is over the limit")
        header = bytearray(header_size)
        self._fill(memoryview(header), deadline)
        kind, fields, described = _header(header, body_size)
        seen = zlib.crc32(header)
        arrays = {}
        for name, dtype, shape in described:
            array: Array = np.empty(shape, np.dtype(dtype).newbyteorder("<"))
            if array.size:
                view = array.reshape(-1).view(np.uint8).data
                self._fill(view, deadline)
                seen = zlib.crc32(view, seen)
            arrays[name] = array
        if seen != crc:
            raise WireError("a frame arrived damaged (CRC)")
        if any(array.dtype == np.bool_ and array.size and array.view(np.uint8).max() > 1 for array in arrays.values()):
            raise WireError("an array of bool holds other bytes than 0 and 1")
        self._torn[1] = False
        return Message(kind, fields, arrays)

    def roomy(self) -> bool:
        """Whether the peer takes what is sent to it: no more than part of the kernel's buffer is full."""
        poll = select.poll()
        try:
            poll.register(self._sock, select.POLLOUT)
        except ValueError:
            raise Closed("the connection is closed") from None
        return bool(poll.poll(0))

    def ready(self, timeout: float = 0.0) -> bool:
        """Whether something can be received within `timeout` seconds; the end of the connection counts.

        Raises:
            Closed: if this side has closed the connection.
        """
        # Not select, which knows no descriptor above 1023.
        poll = select.poll()
        try:
            poll.register(self._sock, select.POLLIN)
        except ValueError:
            raise Closed("the connection is closed") from None
        return bool(poll.poll(min(max(timeout, 0.0), _LONGEST_POLL) * 1000))

    def close(self) -> None:
        self._sock.close()

    def _fill(self, view: memoryview, deadline: float | None) -> None:
        while view.nbytes:
            if deadline is not None:
                left = deadline - time.monotonic()
                if left <= 0 or not self.ready(left):
                    raise Deadline("nothing arrived in time")
            try:
                count = self._sock.recv_into(view)
            except OSError as error:
                raise Closed(f"the peer is gone: {error}") from None
            if count == 0:
                raise Closed("the peer closed the connection")
            self._torn[1] = True  # until the message is whole
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
    names = set()
    expected = 0
    for item in described:
        if not (isinstance(item, list) and len(item) == 3):
            raise WireError("an array is not described as name, dtype, shape")
        name, dtype, shape = item
        if not isinstance(name, str) or not isinstance(dtype, str) or dtype not in _DTYPES:
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
