"""What a process does, in memory that outlives it: after its death its parent knows what it died of.

Signs of life tell the same, but only every few seconds.
"""

from __future__ import annotations

import mmap
import struct

_LAYOUT = struct.Struct("<q56s")


class LastWords:
    """Memory that is shared with the processes forked after it was made."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)
        self.write("starting", 0)

    def write(self, what: str, step: int) -> None:
        """Says what the process does from now on; costs well under a microsecond."""
        self._memory[: _LAYOUT.size] = _LAYOUT.pack(step, what.encode()[: _LAYOUT.size - 8])

    def read(self) -> tuple[str, int]:
        """What the process did last, and in which step."""
        step, what = _LAYOUT.unpack(self._memory[: _LAYOUT.size])
        return what.rstrip(b"\0").decode(errors="replace"), step

    def close(self) -> None:
        self._memory.close()
