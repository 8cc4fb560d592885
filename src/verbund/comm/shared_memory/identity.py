"""Which processes share memory and see each other's: decided by what the kernel says, never by names or settings."""

from __future__ import annotations

import os
import platform
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACES = ("net", "pid", "user")


class Unavailable(Exception):
    """Why this process cannot take part in collectives through shared memory."""


def host() -> str:
    """What is equal for all processes of one host, and differs between hosts and between containers.

    The boot tells one kernel from another. Processes in different pid or user namespaces cannot open each other's
    memory; different network namespaces are different hosts to whoever made them.

    Raises:
        Unavailable: if this machine is not of a kind for it.
    """
    # Flags are plain stores after the data: x86-64 alone keeps their order. (glibc's large copies are not ordered by
    # themselves, but end with a fence.)
    if platform.machine() not in ("x86_64", "AMD64"):
        raise Unavailable(f"a processor of the kind {platform.machine()} may reorder what is written")
    try:
        boot = _BOOT.read_text(encoding="ascii").strip()
        namespaces = [os.readlink(f"/proc/self/ns/{name}") for name in _NAMESPACES]
    except OSError as error:
        raise Unavailable(f"{error.filename} cannot be read: {error.strerror}") from None
    return " ".join([boot, *namespaces])
