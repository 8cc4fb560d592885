"""Memory of this process. No torch."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_UNIT = 1 if sys.platform == "darwin" else 1024


def peak_bytes() -> int:
    """The most resident memory this process has had, in bytes, since its start or the last `reset_peak`.

    The kernel's `VmHWM` where there is one, which a fork does not inherit from a larger parent once it is
    reset; else `ru_maxrss`.
    """
    try:
        for line in _STATUS.read_bytes().splitlines():
            if line.startswith(b"VmHWM:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return _resource_peak()
    return _resource_peak()


def reset_peak() -> bool:
    """Lets `peak_bytes` count from what is resident now; False where the kernel does not permit it."""
    try:
        _CLEAR.write_bytes(b"5")
    except OSError:
        return False
    return True


def _resource_peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT
