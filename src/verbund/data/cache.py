"""The cache of converted data: a store appears whole or not at all, whoever else converts the same data."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

from verbund.data.manifest import NAME, Manifest
from verbund.errors import DataError

_TEMPORARY = "converting-"


def stored(cache: Path, fingerprint: str, convert: Callable[[Path], Manifest]) -> Path:
    """The store of that fingerprint, converted if it is not there yet.

    Args:
        cache: folder of all stores.
        fingerprint: names the store.
        convert: fills an empty folder with column files and gives the manifest.

    Returns:
        the store's folder.

    Raises:
        DataError: if the conversion fails or the disk is full; nothing half-made is left behind.
    """
    place = cache / "data" / fingerprint[:32]
    if _whole(place):
        return place
    temporary = place.with_name(f"{_TEMPORARY}{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(6)}")
    try:
        temporary.mkdir(parents=True)
        _sweep(place.parent)
        convert(temporary).write(temporary)
        _publish(temporary, place)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            fix = "Make room, or name a folder on another disk as `data.cache`"
            raise DataError("the disk is full", where=str(cache), fix=fix) from None
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOTDIR):
            fix = "Name a folder that can be written as `data.cache`"
            raise DataError(f"cannot be written: {error.strerror}", where=str(cache), fix=fix) from None
        raise DataError(f"the conversion failed: {error}", where=str(cache)) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return place


def _publish(temporary: Path, place: Path) -> None:
    try:
        temporary.rename(place)
    except OSError:
        if _whole(place):
            return  # another process was faster with the same data
        # What lies there was cut short, say by a loss of power. It moves aside, so that no reader sees a mix.
        aside = temporary.with_name(f"{temporary.name}-old")
        place.rename(aside)
        temporary.rename(place)
        shutil.rmtree(aside, ignore_errors=True)


def _whole(place: Path) -> bool:
    if not (place / NAME).is_file():
        return False
    try:
        Manifest.read(place)
    except DataError:
        return False
    return True


def _sweep(folder: Path) -> None:
    """Removes what conversions of this host left behind that were killed."""
    host = f"{_TEMPORARY}{socket.gethostname()}-"
    for entry in folder.glob(f"{_TEMPORARY}*"):
        pid = entry.name.removeprefix(host).split("-")[0]
        if entry.name.startswith(host) and pid.isdigit() and not _alive(int(pid)):
            shutil.rmtree(entry, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
