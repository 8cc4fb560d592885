"""A log that cannot be rewritten unnoticed: each line has the hash of the former one.

Lines are JSON objects; a line's hash is the SHA-256 of its bytes without the line break. Who has once been told the
hash of the last line (the head) notices if any line before it is changed, left out or put in. The server's log of a run
is also what it goes on from after its end: a line is on disk before what it says counts.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verbund.checkpoint import durable
from verbund.errors import InputError, RunFailed

NOTHING = "0" * 64
"""What the first line has for the hash of a former one."""
_LONGEST = 1 << 24


@dataclass(frozen=True)
class Head:
    """The last line of a log: its number, from 1, and its hash; of an empty log 0 and `NOTHING`.

    `log` is the hash of the log's first line, by which logs are told apart.
    """

    count: int
    hash: str
    log: str = ""

    @staticmethod
    def of(value: Any) -> Head | None:
        """The one that `record` gave; None if this is none."""
        known = isinstance(value, list) and len(value) == 3 and type(value[0]) is int and value[0] > 0
        return Head(value[0], str(value[1]), str(value[2])) if known else None

    def record(self) -> list[Any]:
        """As plain JSON values."""
        return [self.count, self.hash, self.log]

    def next(self, content: bytes) -> Head:
        """The head once a line is appended."""
        digest = hashlib.sha256(content).hexdigest()
        return Head(self.count + 1, digest, self.log or digest)


class AuditLog:
    """Appends to a log that it has checked from its beginning.

    Args:
        path: is made if there is none; its folder must exist.

    Raises:
        InputError: if the log cannot be read or its chain is broken. A last line without its end is cut off: it was
            being written when the process ended, and did not count.
        RunFailed: if it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise RunFailed(durable.reason(error), where=str(path), fix=durable.remedy(error)) from None
        self.lines: list[dict[str, Any]] = []
        """What the log had when it was opened."""
        self.head = Head(0, NOTHING)
        self._end = 0
        self._closed = False
        for line, size, self.head in _checked(path, torn=True):
            self.lines.append(line)
            self._end += size
        os.ftruncate(self._file, self._end)
        durable.sync_folder(path.parent)

    def append(self, event: str, fields: Mapping[str, Any]) -> Head:
        """Appends a line and waits until it is on disk; the new head.

        Raises:
            RunFailed: if it cannot be written. The log is as it was before.
        """
        if self._closed:
            raise RunFailed("the log is closed", where=str(self.path))
        record = {"n": self.head.count + 1, "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "event": event}
        content = json.dumps({**record, **fields, "former": self.head.hash}, separators=(",", ":")).encode()
        try:
            _write(self._file, content + b"\n")
            os.fdatasync(self._file)
        except OSError as error:
            os.ftruncate(self._file, self._end)
            raise RunFailed(durable.reason(error), where=str(self.path), fix=durable.remedy(error)) from None
        self._end += len(content) + 1
        self.head = self.head.next(content)
        return self.head

    def close(self) -> None:
        """Lets go of the file; nothing is written any more."""
        self._closed = True
        os.close(self._file)


def verify(path: Path, heads: Iterable[Head] = ()) -> Head:
    """Checks a log's chain, and that it has the lines whose hashes somebody was told; its head.

    Raises:
        InputError: naming the line that is not what it was.
    """
    expected = {head.count: head.hash for head in heads}
    head = Head(0, NOTHING)
    for _, _, head in _checked(path):
        told = expected.pop(head.count, head.hash)
        if told != head.hash:
            what = f"its hash is {head.hash[:16]}…, and a client was told {told[:16]}…: the log was rewritten"
            raise InputError(what, where=f"{path}, line {head.count}")
    expected.pop(0, None)
    if expected:
        what = f"it has {head.count} lines, and a client was told of line {max(expected)}: the log was cut off"
        raise InputError(what, where=str(path))
    return head


def heads_told(path: Path, log: str) -> list[Head]:
    """The heads of a server's log that a client has noted in its own.

    Args:
        path: the client's log.
        log: the hash of the first line of the server's.

    Raises:
        InputError: if the client's log cannot be read, its chain is broken, or it was never told of that log.
    """
    noted = [head for line, _, _ in _checked(path, torn=True) if (head := Head.of(line.get("server"))) is not None]
    found = [head for head in noted if head.log == log]
    if not found:
        what = f"it has {len(noted)} heads of server logs, none of them of the log that begins with {log[:16]}…"
        raise InputError(what, where=str(path), fix="That server's log was written anew, or it is of another run")
    return found


def verify_keys(path: Path, client: Path) -> int:
    """Checks that a client was shown the public keys of others that a server's log says all were shown; how many.

    Args:
        path: the server's log.
        client: the client's.

    Raises:
        InputError: naming whose key differs, or if a log cannot be read or its chain is broken.
    """
    shown: dict[str, set[str]] = {}
    for line, _, _ in _checked(path, torn=True):
        for name, key in (line.get("keys") or {}).items() if line.get("event") == "invited" else ():
            shown.setdefault(name, set()).add(key)
    seen = 0
    for line, _, _ in _checked(client, torn=True):
        if line.get("event") != "peers":
            continue
        for name, key in line["keys"].items():
            if name in shown and shown[name] != {key}:
                others = ", ".join(f"{other[:16]}…" for other in sorted(shown[name]))
                what = f"this client was shown {key[:16]}… as the public key of `{name}`"
                what += f", and the server's log has {others}"
                raise InputError(what, where=str(client), fix="Ask its owner which one is right")
            seen += name in shown
    return seen


def _checked(path: Path, torn: bool = False) -> Iterator[tuple[dict[str, Any], int, Head]]:
    """The lines of a log, each with its bytes and the head that it makes."""
    head = Head(0, NOTHING)
    try:
        with open(path, "rb") as file:
            while raw := file.readline(_LONGEST):
                where = f"{path}, line {head.count + 1}"
                if not raw.endswith(b"\n"):
                    if torn:
                        return
                    raise InputError("the last line has no end", where=where)
                line = _line(raw, where)
                if line.get("former") != head.hash:
                    what = "it does not follow on the line before: one of the two was changed, or some are missing"
                    raise InputError(what, where=where, fix="Take the log as its server wrote it")
                head = head.next(raw[:-1])
                if line.get("n") != head.count:
                    raise InputError(f"it bears the number {line.get('n')}", where=where)
                yield line, len(raw), head
    except OSError as error:
        raise InputError(f"the log cannot be read: {error.strerror}", where=str(path)) from None


def _line(raw: bytes, where: str) -> dict[str, Any]:
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        line = None
    if not isinstance(line, dict):
        raise InputError("this is no line of an audit log", where=where)
    return line


def _write(descriptor: int, content: bytes) -> None:
    view = memoryview(content)
    while view.nbytes:
        view = view[os.write(descriptor, view) :]
