"""Bytes over a connected socket, with deadlines. A plain socket and one under TLS look alike."""

from __future__ import annotations

import select
import socket
import time
from typing import Protocol

from verbund.comm.wire.failure import Closed, Deadline

_LONGEST_POLL = 86400.0
_UNIX_BUFFER = 1 << 22  # bytes; TCP finds its own measure
_TOGETHER = 1 << 16  # bytes of a large message for which who waits is woken: not for every packet
_FEW = 1 << 12  # bytes that are not worth it
_RECORD = 1 << 15  # bytes, more than what TLS may hold back of a record that is not whole yet
_KEEPALIVE = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))


class Stream(Protocol):
    """One thread may send while another one receives."""

    def send(self, view: memoryview) -> int:
        """Sends some of `view` without waiting; BlockingIOError if nothing can be sent now."""

    def receive(self, view: memoryview) -> int:
        """Receives some bytes without waiting, 0 at the end; BlockingIOError if there are none now."""

    def pending(self) -> bool:
        """Whether bytes have been read of the socket that nobody has received yet."""

    @property
    def sock(self) -> socket.socket: ...


class Plain:
    """A socket without encryption."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)  # the flag is shared with whoever has inherited the socket; each call says what it wants
        self.sock = sock

    def send(self, view: memoryview) -> int:
        return self.sock.send(view, socket.MSG_DONTWAIT)

    def receive(self, view: memoryview) -> int:
        return self.sock.recv_into(view, 0, socket.MSG_DONTWAIT)

    def pending(self) -> bool:
        return False


def polled(sock: socket.socket | int, event: int, timeout: float) -> bool:
    """Whether `event` (POLLIN, POLLOUT) comes within so many seconds; the end of the connection counts.

    Raises:
        Closed: if this side has closed the socket.
    """
    # Not select, which knows no descriptor above 1023.
    poll = select.poll()
    try:
        poll.register(sock, event)
    except ValueError:
        raise Closed("the connection is closed") from None
    return bool(poll.poll(min(max(timeout, 0.0), _LONGEST_POLL) * 1000))


def send_all(stream: Stream, view: memoryview, deadline: float | None, stall: float) -> None:
    """Sends all of `view`.

    Args:
        deadline: on the monotonic clock, for the whole.
        stall: seconds that the peer may take nothing; 0 waits for ever.

    Raises:
        Closed: if the peer is gone or took nothing for `stall` seconds.
        Deadline: if the deadline passed.
    """
    while view.nbytes:
        try:
            view = view[stream.send(view) :]
            continue
        except BlockingIOError:
            pass
        except OSError as error:
            raise Closed(f"the peer is gone: {error}") from None
        left = _LONGEST_POLL if deadline is None else deadline - time.monotonic()
        if left <= 0:
            raise Deadline("the peer did not take everything in time")
        if not polled(stream.sock, select.POLLOUT, min(left, stall or left)) and 0 < stall <= left:
            raise Closed(f"the peer is gone: it took nothing for {stall:g} s")


def receive_some(stream: Stream, view: memoryview, deadline: float | None, stall: float = 0) -> int:
    """Receives at least one byte.

    Args:
        deadline: on the monotonic clock.
        stall: where there is no deadline, seconds after which a peer that says nothing counts as gone; 0: no limit.

    Raises:
        Closed: if the peer closed the connection, or is silent for so long.
        Deadline: if nothing came.
    """
    while True:
        try:
            count = stream.receive(view)
        except BlockingIOError:
            left = stall or _LONGEST_POLL if deadline is None else deadline - time.monotonic()
            if left <= 0 or not _readable(stream.sock, view.nbytes, left):
                if deadline is not None:
                    raise Deadline("nothing arrived in time") from None
                if stall:
                    raise Closed(f"the peer is gone: it said half a message, and nothing for {stall:g} s") from None
            continue
        except OSError as error:
            raise Closed(f"the peer is gone: {error}") from None
        if count == 0:
            raise Closed("the peer closed the connection")
        return count


def _readable(sock: socket.socket, missing: int, timeout: float) -> bool:
    """Whether something comes within so many seconds; where `missing` bytes must come, not before there are many."""
    enough = min(missing - _RECORD, _TOGETHER)
    if enough < _FEW or sock.family == socket.AF_UNIX:
        return polled(sock, select.POLLIN, timeout)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, enough)
        try:
            return polled(sock, select.POLLIN, timeout)
        finally:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
    except OSError as error:
        raise Closed(f"the peer is gone: {error}") from None


def prepare(sock: socket.socket) -> None:
    """Makes a connected socket fit for messages: small ones leave at once, and a peer whose host is gone is noticed."""
    if sock.family == socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER)
    else:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE:
            if hasattr(socket, name):  # Linux
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def limit_silence(sock: socket.socket, seconds: float) -> None:
    """Breaks a TCP connection whose peer's host acknowledges nothing, neither data nor probes, for so long."""
    if sock.family == socket.AF_UNIX or not hasattr(socket, "TCP_USER_TIMEOUT"):
        return
    pause = max(1, int(seconds / 6))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, pause)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, pause)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(1000 * seconds)))
