"""The owner's side of a run's files: what hosts that do not see them may read and write.

Whoever asks has proved to know the run's secret. By hash only that can be read which was offered; by path only what
belongs to a checkpoint of a folder that was opened, and there only journals and parts of a save can be written.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from verbund.checkpoint import durable
from verbund.comm.files import PART_BYTES, Bytes
from verbund.comm.wire import Connection, Message, Replies, Reply
from verbund.errors import InputError, RunFailed

_READ = re.compile(r"step-[0-9.]+/[a-z0-9.-]+")
"""The last two parts of what is read by its path: of checkpoints."""
_WRITTEN = re.compile(
    r"(journal/[a-z]+-[0-9-]+\.jsonl|\.step-[0-9]+\.partial/part-[0-9-]+\.safetensors|[^/]+/\.[^/]+\.part-[0-9]+)"
)
"""And of what is written: journals, parts of a save, parts of predictions."""
_DIMENSIONS = 64
_BOX_BYTES = 32 << 20
_CONNECTIONS = 4096


class FileService:
    """Serves any number of connections, each by a thread."""

    def __init__(self) -> None:
        self._replies = Replies(self._answer, keep_bytes=1 << 20)
        self._folders: list[Path] = []
        self._offered: dict[str, Path | bytes] = {}
        self._connections: set[Connection] = set()
        self._lock = threading.Lock()
        self.bytes = 0
        """Of files, read and written."""

    def open(self, folder: Path) -> None:
        """What lies below a folder can be read and written from now on, as far as it belongs to a run."""
        if (path := folder.resolve()) not in self._folders:
            self._folders.append(path)

    def offer(self, sha256: str, content: Path | bytes) -> None:
        """A file that can be read by its hash from now on."""
        self._offered[sha256] = content

    def serve(self, connection: Connection) -> None:
        """Answers what comes over a connection, in a thread of its own."""
        with self._lock:
            if len(self._connections) >= _CONNECTIONS:
                connection.close()
                return
            self._connections.add(connection)
        threading.Thread(target=self._serve, args=(connection,), name="files", daemon=True).start()

    def close(self) -> None:
        """Ends all connections."""
        with self._lock:
            for connection in self._connections:
                connection.end()

    def _serve(self, connection: Connection) -> None:
        try:
            self._replies.serve(connection)
        finally:
            with self._lock:
                self._connections.discard(connection)

    def _answer(self, message: Message) -> Reply:
        fields = message.fields
        try:
            match message.kind:
                case "get":
                    return self._part(self._content(str(fields["sha256"])), fields)
                case "read":
                    return self._part(self._path(fields, _READ), fields)
                case "box":
                    return self._box(self._path(fields, _READ), fields)
                case "size":
                    return self._size(fields)
                case "put":
                    return self._put(self._path(fields, _WRITTEN), fields, message.arrays["part"])
                case "finish":
                    return self._finish(self._path(fields, _WRITTEN), fields)
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"is no request for a file: {error}", where=message.kind) from None
        except OSError as error:
            where = str(fields.get("path") or error.filename)
            raise RunFailed(durable.reason(error), where=where, fix=durable.remedy(error)) from None
        raise InputError("is no request for a file", where=message.kind[:80])

    def _content(self, sha256: str) -> Path | bytes:
        content = self._offered.get(sha256)
        if content is None:
            raise InputError("no file of this hash is offered", where=sha256[:80])
        return content

    def _path(self, fields: Mapping[str, Any], allowed: re.Pattern[str]) -> Path:
        """The path that a request names, if it may.

        Raises:
            InputError: if it may not.
        """
        path = Path(str(fields["path"]))
        whole = path.parent.resolve() / path.name
        inside = any(folder in whole.parents for folder in self._folders)
        if not inside or not allowed.fullmatch(f"{whole.parent.name}/{whole.name}") or whole.is_symlink():
            raise InputError("is no file of the run that other hosts may use so", where=str(path)[:300])
        return whole

    def _part(self, content: Path | bytes, fields: Mapping[str, Any]) -> Reply:
        offset, count = _whole(fields["offset"]), min(_whole(fields["count"]), PART_BYTES)
        if isinstance(content, bytes):
            raw = content[offset : offset + count]
        else:
            with open(content, "rb", buffering=0) as file:
                raw = os.pread(file.fileno(), count, offset)
        self.bytes += len(raw)
        return Reply("part", {}, {"part": np.frombuffer(raw, np.uint8)}, keep=False)

    def _box(self, path: Path, fields: Mapping[str, Any]) -> Reply:
        """Of an array in a file what lies in a box: no more than that travels."""
        shape, offset, length = ([_whole(n) for n in fields[key]] for key in ("shape", "offset", "length"))
        at, itemsize = _whole(fields["at"]), _whole(fields["itemsize"])
        if not len(shape) == len(offset) == len(length) <= _DIMENSIONS or not 0 < itemsize <= 16:
            raise ValueError("this is no box")
        if any(begin + many > size for begin, many, size in zip(offset, length, shape, strict=True)):
            raise ValueError("the box lies outside of the array")
        if (size := itemsize * math.prod(length)) > _BOX_BYTES:
            raise ValueError(f"a box of {size} bytes is over the limit")
        array: Any = np.memmap(path, f"V{itemsize}", "r", at, tuple(shape) or (1,))
        box = tuple(slice(begin, begin + many) for begin, many in zip(offset, length, strict=True))
        part = np.ascontiguousarray(array[box]).reshape(-1).view(np.uint8)
        self.bytes += part.size
        return Reply("part", {}, {"part": part}, keep=False)

    def _size(self, fields: Mapping[str, Any]) -> Reply:
        try:
            path = self._path(fields, _WRITTEN)
        except InputError:
            path = self._path(fields, _READ)
        return Reply("size", {"bytes": path.stat().st_size if path.is_file() else -1}, keep=False)

    def _put(self, path: Path, fields: Mapping[str, Any], part: Bytes) -> Reply:
        if path.parent.name.startswith(".step-") or path.parent.name == "journal":
            path.parent.mkdir(exist_ok=True)  # a run's own directory that is gone is not made anew
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_TRUNC if fields.get("new") else 0)
        file = os.open(path, flags, 0o644)
        try:
            offset, rest = _whole(fields["offset"]), memoryview(np.ascontiguousarray(part, np.uint8).data)
            while rest:
                written = os.pwrite(file, rest, offset)
                offset, rest = offset + written, rest[written:]
        finally:
            os.close(file)
        self.bytes += part.size
        return Reply("taken")

    def _finish(self, path: Path, fields: Mapping[str, Any]) -> Reply:
        """A file is whole: it is on disk, and is what was sent."""
        with open(path, "rb", buffering=0) as file:
            os.fsync(file.fileno())
            same = os.fstat(file.fileno()).st_size == fields["bytes"]  # before a file with a hole of years is read
            same = same and hashlib.file_digest(file, "sha256").hexdigest() == fields["sha256"]
        if not same:
            path.unlink(missing_ok=True)
            raise RunFailed("what came is not what was sent", where=str(path))
        return Reply("taken")


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError("a whole number is missing")
    return value
