"""Where a file or folder lies: on this host, or at the run's owner, which is asked over the wire."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol, TypeAlias

import numpy as np

from verbund.comm.files.line import AHEAD, PART_BYTES, Bytes, Line
from verbund.comm.wire.calls import Call

_BUFFER = 1 << 20


@dataclass(frozen=True)
class Remote:
    """A file or folder that lies at the run's owner.

    Args:
        line: to the owner.
        path: absolute, as the owner has it.
    """

    line: Line
    path: str

    def __truediv__(self, name: str) -> Remote:
        return Remote(self.line, os.path.join(self.path, name))

    def __str__(self) -> str:
        return self.path

    def size(self) -> int | None:
        """Bytes of the file; None if there is none."""
        size = int(self.line.ask("size", path=self.path).fields["bytes"])
        return size if size >= 0 else None

    def read(self, limit: int, offset: int = 0) -> bytes:
        """The file from `offset` on, `limit` bytes at most.

        Raises:
            VerbundError: if it cannot be read.
        """
        found = bytearray()
        while len(found) < limit:
            count = min(PART_BYTES, limit - len(found))
            answer = self.line.ask("read", path=self.path, offset=offset + len(found), count=count)
            part = answer.arrays["part"]
            found += np.asarray(part).tobytes()
            if part.size < count:
                break
        return bytes(found)

    def read_box(
        self, at: int, shape: Sequence[int], itemsize: int, box: tuple[Sequence[int], Sequence[int]], into: Bytes
    ) -> Call:
        """Begins to read a box of an array that lies in the file, row-major; `line.result` waits for it.

        Args:
            at: the array's first byte in the file.
            shape: of the array.
            itemsize: bytes of an element.
            box: where the box begins in the array, and how long it is, per dimension.
            into: is filled, [bytes of the box].
        """
        offset, length = list(box[0]), list(box[1])
        return self.line.start(
            "box", into, path=self.path, at=at, shape=list(shape), itemsize=itemsize, offset=offset, length=length
        )


Location: TypeAlias = Path | Remote


class NewFile(Protocol):
    """A file that is being written, in order."""

    def write(self, data: memoryview) -> object:
        """Appends; `data` must not change before `finish`."""
        ...

    def finish(self, sha256: str) -> None:
        """All is written: it is on disk when this returns."""
        ...


class _Here:
    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.write = file.write

    def finish(self, sha256: str) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())


class _There:
    """A few parts are on their way at a time."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self._small = bytearray()
        self._sent, self._begun = 0, False
        self._under_way: list[Call] = []

    def write(self, data: memoryview) -> None:
        if len(data) < _BUFFER:
            self._small += data
            if len(self._small) < _BUFFER:
                return
            data = self._kept()
        elif self._small:
            self._send(self._kept())
        for at in range(0, len(data), PART_BYTES):
            self._send(data[at : at + PART_BYTES])

    def finish(self, sha256: str) -> None:
        if self._small or not self._begun:
            self._send(self._kept())
        while self._under_way:
            self._remote.line.result(self._under_way.pop(0))
        self._remote.line.ask("finish", path=str(self._remote), bytes=self._sent, sha256=sha256)

    def give_up(self) -> None:
        for call in self._under_way:
            call.give_up()

    def _kept(self) -> memoryview:
        kept, self._small = memoryview(bytes(self._small)), bytearray()
        return kept

    def _send(self, data: memoryview) -> None:
        line, new = self._remote.line, not self._begun
        while len(self._under_way) >= AHEAD:
            line.result(self._under_way.pop(0))
        part = np.frombuffer(data, np.uint8)
        call = line.start("put", None, part, path=str(self._remote), offset=self._sent, new=new)
        if new:  # it makes the file
            line.result(call)
        else:
            self._under_way.append(call)
        self._begun = True
        self._sent += len(data)


@contextmanager
def new_file(place: Location) -> Iterator[NewFile]:
    """A new file in place of what is there; whoever has written all calls `finish`.

    Raises:
        OSError: if it cannot be written here.
        VerbundError: if it cannot be written at the owner.
    """
    if isinstance(place, Path):
        with open(place, "wb", buffering=_BUFFER) as file:
            yield _Here(file)
        return
    there = _There(place)
    try:
        yield there
    finally:
        there.give_up()
