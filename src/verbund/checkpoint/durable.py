"""Files that are whole or not there: written beside, synced, renamed."""

from __future__ import annotations

import errno
import os
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def sync_folder(folder: Path) -> None:
    """Makes renames and new names in `folder` survive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_new(path: Path, content: bytes) -> None:
    """Writes and syncs a file that nobody reads yet; a half-written one is removed.

    Raises:
        OSError: if it cannot be written, e.g. on a full disk.
    """
    try:
        with open(path, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        path.unlink(missing_ok=True)
        raise


def replace(path: Path, content: bytes) -> None:
    """Replaces `path` by `content` in one step: a reader, and a crash, sees the old file or the new one.

    Raises:
        OSError: if it cannot be written; the old file is intact.
    """
    beside = path.with_name(f".{path.name}.new")
    write_new(beside, content)
    os.replace(beside, path)
    sync_folder(path.parent)


def full(error: OSError) -> bool:
    """Whether a write failed for want of space."""
    return error.errno in _FULL


def reason(error: OSError) -> str:
    """Why a write failed, as a clause."""
    if full(error):
        return "the disk is full (or a quota or size limit is reached)"
    return f"cannot be written: {error.strerror or error}"


def remedy(error: OSError) -> str:
    """What to do about it, as a sentence."""
    if full(error):
        return "Free space there, or lower `checkpoint.keep` or `checkpoint.disk_budget_mb`"
    return "Check that the folder exists and may be written to"
