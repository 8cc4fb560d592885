"""The TCP sockets that a library has opened in this process, to end what goes over them.

gloo has no way to give up what is under way, and keeps its connections as long as anybody refers to a piece of work.
The kernel ends a connection for both sides at once, whoever holds it.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Sockets:
    """Connections that were opened within `opened` blocks."""

    def __init__(self) -> None:
        self._found: dict[int, int] = {}

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

    def shut(self) -> None:
        """Ends the connections, for this process's own threads and for the peers. Their numbers stay in use."""
        now = _sockets()
        for number, identity in self._found.items():
            if now.get(number) != identity:
                continue  # it is closed, and the number may be another's
            with suppress(OSError), socket.socket(fileno=os.dup(number)) as copy:
                if copy.family in (socket.AF_INET, socket.AF_INET6):
                    copy.shutdown(socket.SHUT_RDWR)
        self._found.clear()


def _sockets() -> dict[int, int]:
    """The numbers of this process's sockets, and what the kernel knows each by."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            status = os.stat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[int(name)] = status.st_ino
    return found
