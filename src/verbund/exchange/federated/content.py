"""Files named by their SHA-256, received in parts: who is interrupted goes on where it was.

A file's name tells what must be in it, so parts need no order of their own, what came damaged is never taken, and what
is there already is not sent again.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from verbund.checkpoint import durable
from verbund.errors import InputError, RunFailed

PART_BYTES = 4 << 20
"""Bytes of a file that travel in one message: a few seconds on a slow line."""
_NAME = re.compile(r"[0-9a-f]{64}")


def digest_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Content:
    """A folder of such files.

    Args:
        folder: is made if it is not there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def path(self, digest: str) -> Path:
        """Where the file is or will be.

        Raises:
            InputError: if this is no SHA-256.
        """
        if not _NAME.fullmatch(digest):
            raise InputError(f"`{digest[:80]}` is no SHA-256 in hexadecimal digits")
        return self.folder / digest

    def whole(self, digest: str) -> bool:
        """Whether the file is there and was checked."""
        return self.path(digest).is_file()

    def received(self, digest: str, size: int, sender: str = "") -> int:
        """How many bytes of a file of that size are there, from that sender."""
        if self.whole(digest):
            return size
        try:
            have = self._part(digest, sender).stat().st_size
        except FileNotFoundError:
            return 0
        if have < size:
            return have
        try:  # whoever received the last part was killed before it said so
            self._finish(digest, sender)
        except InputError:
            return 0
        return size

    def append(self, digest: str, size: int, offset: int, part: NDArray[np.uint8], sender: str = "") -> int:
        """Takes a part of a file; with the last one it is checked, synced and there.

        Args:
            digest: of the whole.
            size: of the whole.
            offset: where the part begins; other parts than the next one are passed over.
            part: bytes.
            sender: who sends; of two that send the same file each has parts of its own.

        Returns:
            How many bytes are there.

        Raises:
            InputError: if the whole is not what its name says; all of it is given up.
            RunFailed: if it cannot be written.
        """
        have = self.received(digest, size, sender)
        if have == size and self.whole(digest):
            return size
        if offset == have and offset + part.size <= size:
            try:
                with open(self._part(digest, sender), "ab") as file:
                    file.write(part.data)
                    have += part.size
                    if have == size:
                        file.flush()
                        os.fsync(file.fileno())
            except OSError as error:
                raise _unwritten(self._part(digest, sender), error) from None
        if have == size:
            self._finish(digest, sender)
        return have

    def put(self, content: bytes) -> str:
        """Writes a file of one's own; its name."""
        digest = hashlib.sha256(content).hexdigest()
        if not self.whole(digest):
            try:
                durable.replace(self.path(digest), content)
            except OSError as error:
                raise _unwritten(self.path(digest), error) from None
        return digest

    def read(self, digest: str, offset: int, count: int = PART_BYTES) -> NDArray[np.uint8]:
        """Some bytes of a file that is whole.

        Raises:
            InputError: if there is none.
        """
        try:
            with open(self.path(digest), "rb") as file:
                file.seek(max(offset, 0))
                return np.frombuffer(file.read(min(count, PART_BYTES)), np.uint8)
        except OSError as error:
            raise InputError(f"the file cannot be read: {error.strerror}", where=digest) from None

    def drop(self, digest: str, sender: str = "") -> None:
        """Gives up what has come of a file."""
        self._part(digest, sender).unlink(missing_ok=True)

    def keep(self, digests: set[str]) -> None:
        """Removes all other files, and what has come of them."""
        for path in self.folder.iterdir():
            if path.name.removeprefix(".")[:64] not in digests and (
                _NAME.fullmatch(path.name) or path.name.startswith(".")
            ):
                path.unlink(missing_ok=True)

    def _part(self, digest: str, sender: str) -> Path:
        return self.path(digest).with_name(f".{digest}.{sender}.part")

    def _finish(self, digest: str, sender: str) -> None:
        part = self._part(digest, sender)
        try:
            if digest_of(part) != digest:
                part.unlink()
                raise InputError("what came is not what its name says; send it again from the beginning", where=digest)
            os.replace(part, self.path(digest))
            durable.sync_folder(self.folder)
        except OSError as error:
            raise _unwritten(part, error) from None


def _unwritten(path: Path, error: OSError) -> RunFailed:
    return RunFailed(durable.reason(error), where=str(path), fix=durable.remedy(error))
