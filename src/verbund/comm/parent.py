"""Tying processes' lives to their parents'."""

from __future__ import annotations

import ctypes
import os
import signal
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent: int) -> None:
    """Asks the kernel to kill this process when its parent ends (Linux; elsewhere nothing happens).

    Args:
        parent: the parent's pid, read before the fork: if it is gone already, this process ends at once.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "prctl"):
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Makes this process the parent of whatever its descendants leave behind (Linux; elsewhere nothing happens)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "prctl"):
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children() -> list[int]:
    """The pids of this process's children, adopted ones among them; empty where the kernel does not tell."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            return [int(word) for word in file.read().split()]
    except OSError:
        return []


def end_children(grace: float = 0.0, seconds: float = 5.0) -> None:
    """Kills this process's children after a moment, adopted ones among them, and waits until they are gone.

    Args:
        grace: seconds that they get to end by themselves.
        seconds: after which the wait ends, whoever is left.
    """
    killing = time.monotonic() + grace
    deadline = killing + seconds
    while (left := children()) and time.monotonic() < deadline:
        for pid in left:
            try:
                if os.waitpid(pid, os.WNOHANG)[0] == 0 and time.monotonic() >= killing:
                    os.kill(pid, signal.SIGKILL)
            except (ChildProcessError, ProcessLookupError):
                continue
        time.sleep(0.005)
