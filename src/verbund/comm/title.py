"""The name under which `ps` and `top` show a process. A forked one has its parent's until it says its own."""

from __future__ import annotations

import ctypes
from pathlib import Path

_PR_SET_NAME = 15
_ARG_START, _ARG_END = 45, 46  # proc(5), fields 48 and 49 of `stat`, counted from the state


def entitle(name: str) -> None:
    """Shows this process as `verbund: NAME` where command lines are shown, and as NAME where the kernel speaks of it,
    such as when it kills what takes too much memory (Linux; elsewhere nothing happens).

    The command line is what lies in the memory that the kernel has put the arguments into: the new one is written over
    it, and ends where that does.

    Args:
        name: e.g. `worker 3`; of the short form 15 bytes are kept.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "prctl"):
        return
    libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
    try:
        fields = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
    except (OSError, ValueError, IndexError):
        return
    if 0 < start < end:
        # A last byte that is not zero would say that the line goes on among the variables.
        line = f"verbund: {name}".encode()[: end - start - 1]
        ctypes.memmove(start, line.ljust(end - start, b"\0"), end - start)
