"""Memory of this process, and what there is left. No torch."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_MACHINE = Path("/proc/meminfo")
_GROUP = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")
_UNIT = 1 if sys.platform == "darwin" else 1024


def peak_bytes() -> int:
    """The most resident memory this process has had, in bytes, since its start or the last `reset_peak`.

    The kernel's `VmHWM` where there is one, which a fork does not inherit from a larger parent once it is
    reset; else `ru_maxrss`.
    """
    peak = _kilobytes(_STATUS, "VmHWM:")
    return _resource_peak() if peak is None else peak


def reset_peak() -> bool:
    """Lets `peak_bytes` count from what is resident now; False where the kernel does not permit it."""
    try:
        _CLEAR.write_bytes(b"5")
    except OSError:
        return False
    return True


def available_bytes() -> int | None:
    """The memory that is free on this machine and in this process's control groups; None where nobody says."""
    found = [_kilobytes(_MACHINE, "MemAvailable:"), *map(_of_group, _control_groups())]
    return min((size for size in found if size is not None), default=None)


def left_to_process() -> int | None:
    """What this process may still take, where a limit (`ulimit -v`) is set on it."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    taken = _kilobytes(_STATUS, "VmSize:")
    return None if limit == resource.RLIM_INFINITY or taken is None else max(limit - taken, 0)


def _of_group(folder: Path) -> int | None:
    """What a control group may still take."""
    try:
        limit = int((folder / "memory.max").read_text(encoding="ascii"))  # or "max"
        used = int((folder / "memory.current").read_text(encoding="ascii"))
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
        return max(limit - used + int(statistics.get("inactive_file", 0)), 0)
    except (OSError, ValueError):
        return None


def _control_groups() -> list[Path]:
    """The folders of this process's control group and of those around it (version 2)."""
    try:
        lines = _GROUP.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    own = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "/")
    folder = _GROUPS / own.lstrip("/")
    return [place for place in (folder, *folder.parents) if place.is_relative_to(_GROUPS)]


def _kilobytes(path: Path, key: str) -> int | None:
    """The value of a line such as `VmHWM:  1234 kB`, in bytes."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key)), None)
    except (OSError, ValueError, IndexError):
        return None


def _resource_peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT
