"""Messages in a file, as they would travel: a `Connection` over it writes them, another reads them."""

from __future__ import annotations

import os
import socket
from pathlib import Path


class Stored:
    """A file as a stream: what is sent is appended, what is received is read from the beginning.

    Args:
        path: of the file.
        append: opens it for writing, and makes it if there is none; else for reading.

    Raises:
        OSError: if it cannot be opened.
    """

    def __init__(self, path: Path, append: bool = False) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND if append else os.O_RDONLY
        self._descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
        self.failure: OSError | None = None
        """Why something could not be written."""

    def send(self, view: memoryview) -> int:
        """Appends some of `view`."""
        try:
            return os.write(self._descriptor, view)
        except OSError as error:
            self.failure = error
            raise

    def receive(self, view: memoryview) -> int:
        """Reads some bytes, 0 at the end."""
        return os.readv(self._descriptor, [view])

    def pending(self) -> bool:
        """Nothing is read ahead."""
        return False

    @property
    def sock(self) -> socket.socket:
        """There is none."""
        raise TypeError("a file is no socket")

    def sync(self) -> None:
        """Makes all that was appended survive a loss of power.

        Raises:
            OSError: if it may not.
        """
        os.fdatasync(self._descriptor)

    def cut(self, size: int) -> None:
        """Takes what lies behind so many bytes away."""
        os.ftruncate(self._descriptor, size)

    def close(self) -> None:
        """Lets go of the file."""
        os.close(self._descriptor)
