"""A connection: messages over a connected stream socket."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import xxhash

from verbund.comm.wire import frames
from verbund.comm.wire.failure import Closed, Deadline, WireError
from verbund.comm.wire.frames import BODY_LIMIT, HEADER_LIMIT, MAGIC, PREFIX, Array, Described, Message, Payload, Place
from verbund.comm.wire.memory import Memory
from verbund.comm.wire.stream import Plain, Stream, limit_silence, polled, receive_some, send_all

STALL_SECONDS = 60.0
_BLOCK = 1 << 20  # bytes received between two looks at the sum: they are still in the cache
_TOGETHER = 1 << 16  # bytes that are sooner copied than sent by themselves

Places: TypeAlias = Mapping[str, Place] | Callable[[str, dict[str, Any]], Mapping[str, Place]]
"""Where arrays of a message are received to, by name; or a function of kind and fields that says so."""


@dataclass(frozen=True)
class Peer:
    """Who is at the other end: its address, and under mutual TLS the names in its certificate."""

    address: str = ""
    names: tuple[str, ...] = ()


class Connection:
    """Sends and receives messages over one connected socket. Sending is safe from several threads.

    Args:
        stream: a connected stream socket (Unix or TCP), plain or under TLS; the connection owns it from now on.
        body_limit: bytes of arrays that one message may carry.
        header_limit: bytes of kind, fields and descriptions that one message may carry.
        stall: seconds that the peer may take nothing of what is sent, or say nothing within a message, before it
            counts as gone; 0: no limit.
        peer: who is at the other end, as far as it is known.
    """

    def __init__(
        self,
        stream: socket.socket | Stream,
        body_limit: int = BODY_LIMIT,
        header_limit: int = HEADER_LIMIT,
        stall: float = STALL_SECONDS,
        peer: Peer | None = None,
    ) -> None:
        self.peer = peer or Peer()
        self._stream: Stream = Plain(stream) if isinstance(stream, socket.socket) else stream
        self._body_limit = body_limit
        self._header_limit = header_limit
        self._stall = stall
        self.sent_bytes = 0
        """Bytes of whole messages that were sent."""
        self.received_bytes = 0
        self._sending = threading.Lock()
        self._torn = [False, False]  # whether a frame was left half-sent, half-received

    def fileno(self) -> int:
        return self._stream.sock.fileno()

    def send(
        self, kind: str, fields: Mapping[str, Any] | None = None, timeout: float | None = None, /, **arrays: Payload
    ) -> None:
        """Sends one message whole.

        Args:
            kind: what the message is.
            fields: plain JSON values.
            timeout: seconds until the peer's side must have taken it whole; None: `stall` alone limits.
            arrays: what travels raw.

        Raises:
            Closed: if the peer is gone, or took nothing for `stall` seconds.
            Deadline: if `timeout` passed. If part of the message was sent, the connection can send no more.
            ValueError: if header or body is over its limit or a dtype cannot travel. Nothing was sent, and
                the connection is as good as before.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        header, body = frames.encode(kind, fields, arrays)
        size = sum(len(part) for part in body)
        for what, count, limit in (
            ("header", len(header), self._header_limit),
            ("body", size, self._body_limit),
        ):
            if count > limit:
                raise ValueError(f"the message `{kind}` has a {what} of {count} bytes, over the limit of {limit}")
        check = xxhash.xxh3_64(header)
        for part in body:
            check.update(part)
        first = PREFIX.pack(MAGIC, len(header), size, check.intdigest()) + header
        parts = [memoryview(b"".join([first, *body]))] if size < _TOGETHER else [memoryview(first), *body]
        if not self._sending.acquire(timeout=-1 if timeout is None else max(timeout, 0.0)):
            raise Deadline("other messages to the peer took all the time")
        try:
            if self._torn[0]:
                raise Closed("the peer is gone: a message to it was left half-sent")
            self._torn[0] = True
            for part in parts:
                send_all(self._stream, part, deadline, self._stall)
            self.sent_bytes += len(first) + size
            self._torn[0] = False
        finally:
            self._sending.release()

    def receive(
        self, timeout: float | None = None, into: Places | None = None, memory: Memory | None = None
    ) -> Message:
        """The next message.

        Args:
            timeout: seconds until the whole message must have arrived; None waits for ever and is for threads
                whose peer's death closes the socket.
            into: where arrays are received to without a copy. If the message turns out damaged, these places hold
                whatever came.
            memory: where the others are received to; valid until the next message. None: memory of their own.

        Raises:
            Deadline: if `timeout` passed. If part of a message had come, the connection is of no further use.
            Closed: if the peer closed the connection between two messages or within one.
            WireError: if what came is damaged, over a limit, or does not fit `into`.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        if self._torn[1]:
            raise WireError("a message of the peer was left half-read")
        prefix = bytearray(PREFIX.size)
        self._fill(memoryview(prefix), deadline)
        magic, header_size, body_size, check = PREFIX.unpack(prefix)
        if magic != MAGIC:
            raise WireError("the peer does not speak this protocol")
        if header_size > self._header_limit or body_size > self._body_limit:
            raise WireError(f"a frame of {header_size} + {body_size} bytes is over the limit")
        header = bytearray(header_size)
        seen = xxhash.xxh3_64()
        self._fill(memoryview(header), deadline, seen)
        kind, fields, described = frames.decode(header, body_size, self._body_limit)
        places = (into(kind, fields) if callable(into) else into) or {}
        found = [(array, array.place(places[array.name]) if array.name in places else None) for array in described]
        if memory is not None:
            memory.begin()
        received = [(array, place, self._array(array, place, memory, deadline, seen)) for array, place in found]
        if seen.intdigest() != check:
            raise WireError("a frame arrived damaged (its sum is wrong)")
        arrays = {}
        for array, place, raw in received:
            values = array.finish(raw, place)
            if place is None:
                arrays[array.name] = values
        self._torn[1] = False
        self.received_bytes += PREFIX.size + header_size + body_size
        return Message(kind, fields, arrays, frozenset(places).intersection(array.name for array in described))

    def _array(
        self, array: Described, place: Array | None, memory: Memory | None, deadline: float | None, seen: Any
    ) -> Array:
        raw = array.allocate(memory.take if memory is not None else None) if place is None or array.packed else place
        if raw.size:
            self._fill(raw.reshape(-1).view(np.uint8).data, deadline, seen)
        return raw

    def roomy(self) -> bool:
        """Whether the peer takes what is sent to it: no more than part of the kernel's buffer is full."""
        return polled(self._stream.sock, select.POLLOUT, 0.0)

    def ready(self, timeout: float = 0.0) -> bool:
        """Whether something can be received within `timeout` seconds; the end of the connection counts.

        Raises:
            Closed: if this side has closed the connection.
        """
        return self._stream.pending() or polled(self._stream.sock, select.POLLIN, timeout)

    def break_after(self, seconds: float) -> None:
        """From now on the connection breaks when the peer's host has not answered for so long (TCP; Linux)."""
        limit_silence(self._stream.sock, seconds)

    def close(self) -> None:
        """Gives up this process's end; the connection ends when all processes that have it did."""
        self._stream.sock.close()

    def end(self) -> None:
        """Ends the connection for whoever has it, and wakes this process's threads that wait for it."""
        try:
            self._stream.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it has ended already

    def _fill(self, view: memoryview, deadline: float | None, seen: Any = None) -> None:
        while view.nbytes:
            stall = self._stall if self._torn[1] else 0
            count = receive_some(self._stream, view[:_BLOCK], deadline, stall)
            self._torn[1] = True  # until the message is whole
            if seen is not None:
                seen.update(view[:count])
            view = view[count:]
