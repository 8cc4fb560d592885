"""A file that is only ever appended to, on this host or at the run's owner."""

from __future__ import annotations

import errno
import os
import queue
import threading
import time
from pathlib import Path
from typing import Protocol

import numpy as np

from verbund.comm.files import Location, Remote
from verbund.errors import VerbundError

_PENDING_BYTES = 8 << 20
"""What may wait to be sent: a link that stands still must not hold up the training, nor take its memory."""
_CLOSE_SECONDS = 20.0


class Appended(Protocol):
    """The end of a file."""

    size: int
    """Bytes that were there when it was opened."""

    def write(self, data: memoryview) -> int:
        """Appends what it can; how many bytes that were. Raises OSError if none can be written."""
        ...

    def close(self) -> None:
        """Sees to it that what was written is there."""
        ...


def appended(path: Location) -> Appended:
    """Opens a file to append to it; its folder is made if it is not there."""
    return _Here(path) if isinstance(path, Path) else _There(path)


class _Here:
    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self.size = os.fstat(self._file).st_size

    def write(self, data: memoryview) -> int:
        return os.write(self._file, data)

    def close(self) -> None:
        os.close(self._file)


class _There:
    """A thread sends what is written, in order and to its place, so that what comes twice does no harm."""

    def __init__(self, file: Remote) -> None:
        self._remote = file
        self.size = file.size() or 0
        self._end = self.size
        self._pending = 0
        self._changed = threading.Condition()
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._failed = False
        self._thread = threading.Thread(target=self._send, name="journal", daemon=True)
        self._thread.start()

    def write(self, data: memoryview) -> int:
        with self._changed:
            if self._failed or self._pending + len(data) > _PENDING_BYTES:
                raise OSError(errno.ENOBUFS, "the owner of the run takes nothing")
            self._pending += len(data)
        self._queue.put(bytes(data))
        return len(data)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(_CLOSE_SECONDS)

    def _send(self) -> None:
        while (data := self._queue.get()) is not None:
            while True:
                try:
                    part = np.frombuffer(data, np.uint8)
                    line = self._remote.line
                    line.result(line.start("put", None, part, path=str(self._remote), offset=self._end))
                except VerbundError:
                    self._failed = True  # what comes meanwhile is dropped, and counted
                    time.sleep(1.0)
                    continue
                break
            self._end += len(data)
            with self._changed:
                self._pending -= len(data)
                self._failed = False
