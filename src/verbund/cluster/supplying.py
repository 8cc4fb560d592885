"""A host's side of its supply: what it lacks is found there, or read from the command into its cache."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from verbund.cluster.supplies import CODE_BYTES, Kind, same_files
from verbund.comm.files import PART_BYTES, Line
from verbund.comm.rendezvous import Meeting
from verbund.comm.wire import Message
from verbund.comm.wire.calls import Call
from verbund.errors import InputError, RunFailed

_TELL_SECONDS = 0.5
_LISTING_BYTES = 1 << 28
_SPARE_BYTES = 64 << 20
"""Room that is left on the disk."""
_TEMPORARY = "receiving-"
_OLD_SECONDS = 86400.0

Files = list[tuple[str, int, str]]


class Supplying:
    """Gets what is missing.

    Args:
        meeting: of the run.
        cache: the folder in which what comes is kept, this user's alone.
        alone: nothing is looked for in the folders that the command has it in.
        tell: is told how many bytes have come.
    """

    def __init__(self, meeting: Meeting, cache: Path, alone: bool, tell: Callable[[int], None]) -> None:
        self._line = Line(meeting)
        self._cache, self._alone, self._tell = cache, alone, tell
        self._bytes = 0
        self._told = 0.0

    def places(self, trees: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """Where each of these folders of the command is on this host, once it is there.

        Raises:
            InputError: if there is no room, or the cache cannot be written.
            RunFailed: if what comes is not what its hash says.
        """
        wanted: list[tuple[Mapping[str, Any], Files, Path]] = []
        found: dict[str, str] = {}
        for tree in trees:
            files = self._listing(tree)
            target = self._cache / str(tree["kind"]) / str(tree["sha256"])[:32]
            theirs = Path(str(tree["folder"]))
            own = [*([] if self._alone else [theirs]), target.with_name(theirs.name), target]
            if (here := next((at for at in own if same_files(at, tree["kind"], files)), None)) is not None:
                found[str(tree["folder"])] = str(here)
            else:
                wanted.append((tree, files, target))
        self._check_room(sum(_lacking(files, _kept(target)) for _, files, target in wanted))
        for tree, files, target in wanted:
            self._receive(files, target, tree["kind"])
            found[str(tree["folder"])] = str(target)
        return found

    def _listing(self, tree: Mapping[str, Any]) -> Files:
        size = int(tree["bytes"])
        if size > _LISTING_BYTES:
            raise InputError(f"has too many files to travel ({size} bytes of names)", where=str(tree["folder"]))
        content = bytearray()
        self._each(str(tree["sha256"]), size, content.extend)
        if hashlib.sha256(content).hexdigest() != tree["sha256"]:
            raise RunFailed("the list of files that came is not what was announced", where=str(tree["folder"]))
        files = [(str(name), int(many), str(sha256)) for name, many, sha256 in json.loads(content)]
        if any(Path(name).is_absolute() or ".." in Path(name).parts for name, _, _ in files):
            raise RunFailed("a file would lie outside of its folder", where=str(tree["folder"]))
        if tree["kind"] == "code" and sum(many for _, many, _ in files) > CODE_BYTES:
            raise RunFailed("more code would come than may", where=str(tree["folder"]))
        return files

    def _check_room(self, need: int) -> None:
        if not need:
            return
        try:
            self._cache.mkdir(parents=True, exist_ok=True, mode=0o700)
            free = shutil.disk_usage(self._cache).free
        except OSError as error:
            raise self._unwritten(error) from None
        if need + _SPARE_BYTES > free:
            raise InputError(
                f"the task and the data need {need} bytes there, and {max(0, free - _SPARE_BYTES)} are free",
                where=str(self._cache),
                fix="Make room, or name a folder on another disk: `verbund join --folder`, or XDG_CACHE_HOME",
            )

    def _receive(self, files: Files, target: Path, kind: Kind) -> None:
        """A folder appears whole, each of its files checked by its hash, or not at all; what had come when the line
        was lost or the process killed need not come again."""
        try:
            with _receiving(target) as temporary:
                try:
                    for name, size, sha256 in files:
                        self._file(temporary / name, size, sha256, kind)
                except (OSError, _Changed):  # a full disk gets its room back; what has changed is of no use
                    shutil.rmtree(temporary, ignore_errors=True)
                    raise
                if same_files(target, kind, files):  # another one on this host was faster
                    shutil.rmtree(temporary, ignore_errors=True)
                else:
                    shutil.rmtree(target, ignore_errors=True)
                    temporary.rename(target)
        except OSError as error:
            raise self._unwritten(error) from None

    def _file(self, path: Path, size: int, sha256: str, kind: Kind) -> None:
        """Gets a file, from where an earlier try has left it."""
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(path, "a+b") as file:
            had = file.tell()
            if had > size:
                file.truncate(had := 0)
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256")

            def took(part: memoryview) -> None:
                digest.update(part)
                file.write(part)

            self._each(sha256, size, took, had)
            if had and digest.hexdigest() != sha256:  # what was left is damaged
                file.truncate(0)
                digest = hashlib.sha256()
                self._each(sha256, size, took)
            if kind == "data":  # which is known by its manifest's hash from now on
                file.flush()
                os.fsync(file.fileno())
        if digest.hexdigest() != sha256:
            raise _Changed("what came is not what was announced: the file has changed", where=path.name)

    def _each(self, sha256: str, size: int, took: Callable[[memoryview], object], begin: int = 0) -> None:
        """Reads a file part by part, from its byte `begin` on."""

        def starts() -> Iterator[Callable[[], Call]]:
            for offset in range(begin, size, PART_BYTES):
                yield lambda offset=offset: self._line.start(  # type: ignore[misc]
                    "get", sha256=sha256, offset=offset, count=min(PART_BYTES, size - offset)
                )

        def take(message: Message) -> None:
            part = np.ascontiguousarray(message.arrays["part"])
            if not part.size:
                raise _Changed("a file has become shorter", where=sha256)
            took(part.data)
            self._bytes += part.size
            if time.monotonic() - self._told > _TELL_SECONDS:
                self._told = time.monotonic()
                self._tell(self._bytes)

        self._line.each(starts(), take)

    def _unwritten(self, error: OSError) -> InputError:
        fix = "Name a folder that can be written, with room: `verbund join --folder`, or XDG_CACHE_HOME"
        return InputError(f"cannot be written: {error.strerror}", where=str(self._cache), fix=fix)


class _Changed(RunFailed):
    """The command's file is no longer what was announced."""


@contextmanager
def _receiving(target: Path) -> Iterator[Path]:
    """The folder in which `target` is gathered. One process at a time goes on in the one that stays when it is cut
    off; others have one of their own meanwhile, which does not."""
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    kept = _kept(target)
    kept.mkdir(exist_ok=True, mode=0o700)
    if (lock := _locked(kept)) is not None:
        try:
            os.utime(kept)
            _sweep(target.parent)
            yield kept
        finally:
            os.close(lock)
        return
    own = target.with_name(f"{_TEMPORARY}{os.getpid()}-{secrets.token_hex(6)}")
    own.mkdir(mode=0o700)
    lock = _locked(own)
    try:
        yield own
    finally:
        shutil.rmtree(own, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _lacking(files: Files, kept: Path) -> int:
    """Bytes that are still to come."""
    need = 0
    for name, size, _ in files:
        try:
            had = (kept / name).stat().st_size
        except OSError:
            had = 0
        need += size - had if had <= size else size
    return need


def _kept(target: Path) -> Path:
    return target.with_name(f"{_TEMPORARY}{target.name}")


def _locked(folder: Path) -> int | None:
    """A descriptor that keeps others from a folder; None if another has it, or if it is gone."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), os.stat(folder)):  # else it has got its name just now
            return lock
    except OSError:
        pass
    os.close(lock)
    return None


def _sweep(folder: Path) -> None:
    """Removes what was not finished long ago and nobody works at."""
    for entry in folder.glob(f"{_TEMPORARY}*"):
        try:
            old = time.time() - entry.stat().st_mtime > _OLD_SECONDS
        except OSError:
            continue
        if old and (lock := _locked(entry)) is not None:
            shutil.rmtree(entry, ignore_errors=True)
            os.close(lock)
