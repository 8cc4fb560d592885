"""The TCP sockets that a library has opened in this process, to end what goes over them.

gloo has no way to give up what is under way, and keeps its connections as long as anybody refers to a piece of work.
The kernel ends a connection for both sides at once, whoever holds it.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

# Of tcp(7)'s `tcp_info`: retransmissions since the last acknowledgement, segments that are not acknowledged, and
# milliseconds since the last acknowledgement.
_TCP_INFO = struct.Struct("=2xB5x16xI28xI")


class Sockets:
    """Connections that were opened within `opened` blocks."""

    def __init__(self) -> None:
        self._found: dict[int, int] = {}
        self._over = False
        self._stalled: dict[int, float] = {}

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Takes note of the sockets that are opened within the block."""
        before = _sockets()
        try:
            yield
        finally:
            self._found |= {
                number: identity for number, identity in _sockets().items() if before.get(number) != identity
            }
            if self._over:
                self.shut()

    def shut(self) -> None:
        """Ends the connections, for this process's own threads and for the peers, and those that are still being
        opened as soon as they are. Their numbers stay in use. From any thread."""
        self._over = True
        for number, identity in list(self._found.items()):
            if _socket(number) != identity:
                continue  # it is closed, and the number may be another's
            with suppress(OSError), socket.socket(fileno=os.dup(number)) as copy:
                if copy.family in (socket.AF_INET, socket.AF_INET6):
                    copy.shutdown(socket.SHUT_RDWR)
        self._found.clear()

    def stalled(self) -> dict[str, float]:
        """By peer's address the seconds for which it has acknowledged nothing of what was sent to it again and again,
        as far as was seen by former calls. A peer that only reads nothing still acknowledges.

        A kernel gives up such a connection by itself, but only after a quarter of an hour.
        """
        found, still, now = dict[str, float](), dict[int, float](), time.monotonic()
        for number, identity in list(self._found.items()):
            if _socket(number) != identity:
                continue
            with suppress(OSError), socket.socket(fileno=os.dup(number)) as copy:
                if copy.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                again, unacknowledged, acknowledged = _TCP_INFO.unpack(
                    copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
                )
                since = self._stalled.get(identity, now)
                if again and unacknowledged and acknowledged / 1000 >= now - since:
                    still[identity] = since
                    address = str(copy.getpeername()[0])
                    found[address] = max(found.get(address, 0.0), now - since)
        self._stalled = still
        return found


def _sockets() -> dict[int, int]:
    """The numbers of this process's sockets, and what the kernel knows each by."""
    numbers = map(int, os.listdir("/proc/self/fd"))
    return {number: identity for number in numbers if (identity := _socket(number)) is not None}


def _socket(number: int) -> int | None:
    """What the kernel knows the socket of this number by; None if it is none."""
    with suppress(OSError):
        status = os.fstat(number)
        if stat.S_ISSOCK(status.st_mode):
            return status.st_ino
    return None
