"""The sockets that a library has opened in this process, and which only it knows: to end them from outside.

gloo's destructor waits for the collectives that are under way, and its `abort` ends nothing, so a process that leaves a
group would hold up all others that wait there for it until their timeout.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

_DESCRIPTORS = "/proc/self/fd"


class Sockets:
    """Sockets by descriptor and inode."""

    def __init__(self) -> None:
        self._known: dict[int, str] = {}

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Those that are opened within the block, by whatever thread, are taken note of."""
        before = _sockets()
        yield
        self._known |= {number: name for number, name in _sockets().items() if before.get(number) != name}

    def shut_down(self) -> None:
        """Ends their connections: both sides read an end. The descriptors stay the library's to close."""
        there = _sockets()
        for number, name in self._known.items():
            if there.get(number) != name:
                continue  # it was closed, and the descriptor is another file's
            try:
                with socket.socket(fileno=os.dup(number)) as copy:
                    copy.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # it was not connected, or has ended


def _sockets() -> dict[int, str]:
    found = {}
    for entry in os.listdir(_DESCRIPTORS):
        try:
            name = os.readlink(f"{_DESCRIPTORS}/{entry}")
        except OSError:
            continue
        if name.startswith("socket:"):
            found[int(entry)] = name
    return found
