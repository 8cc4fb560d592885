"""Waiting for collectives: whoever waits for one goes on with all others that this process has under way.

So no two members can wait for each other's shares, in whatever order they wait for collectives of different groups.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Protocol

from verbund.comm.peer_lost import PeerLost

# Tries before a process that waits sleeps: a try costs about 2 µs, and the yield lets another one have the core.
_TRIES = 50
_TRIES_CROWDED = 5
_NAP = 0.002  # between two looks at whether the others live
_NAP_BUSY = 0.0002  # while collectives of other groups are under way
_LOOK = 0.005
_STANDSTILL = 0.5  # a look that comes so late: this process was suspended, and the others perhaps with it


class Line(Protocol):
    """Collectives that are over in the order in which they were started."""

    started: int
    completed: int

    def advance(self) -> bool:
        """Goes on as far as it can without waiting; whether anything moved."""
        ...

    def sleep(self, seconds: float) -> None:
        """Sleeps until it may go on, or for so long."""
        ...

    def lost(self) -> str:
        """Who has ended and is waited for, as words; empty if nobody."""
        ...

    def late(self) -> str:
        """Who is waited for, as words."""
        ...


class Progress:
    """All lines of this process. One thread uses it.

    Args:
        processes: how many processes of ours share the cores.
    """

    def __init__(self, processes: int) -> None:
        self._lines: list[Line] = []
        self.left = False
        """Whether this process goes on with none of it; may be set by any thread."""
        cores = len(os.sched_getaffinity(0))
        self._tries = _TRIES if processes <= cores else _TRIES_CROWDED

    def add(self, line: Line) -> None:
        self._lines.append(line)

    @property
    def pending(self) -> bool:
        """Whether any collective is under way."""
        return any(line.completed < line.started for line in self._lines)

    def advance(self, but: Line | None = None) -> bool:
        """Goes on with all lines; whether anything moved."""
        moved = False
        for line in self._lines:
            if line is not but and line.completed < line.started:
                moved |= line.advance()
        return moved

    def wait(self, line: Line, number: int, what: str, timeout: float) -> None:
        """Waits until collective `number` of a line is over.

        Raises:
            PeerLost: if a member is gone on whom it waits, or the timeout passed.
        """
        tries = 0
        begun = looked = 0.0
        while line.completed <= number:
            if line.advance() or self.advance(line):
                tries = 0
                continue
            tries += 1
            if tries <= self._tries:
                os.sched_yield()
                continue
            now = time.monotonic()
            if not begun:
                begun = looked = now
            if now - looked >= _LOOK:
                if now - looked >= _STANDSTILL:
                    begun += now - looked
                looked = now
                self._look(line, what)
                if now - begun >= timeout:
                    raise PeerLost(f"{what} broke off: {line.late()} did not come within {timeout:g} s")
            busy = any(other is not line and other.completed < other.started for other in self._lines)
            line.sleep(_NAP_BUSY if busy else _NAP)

    def beside(self, wait: Callable[[], None]) -> None:
        """Does `wait`, which blocks, in a thread, and goes on with all lines meanwhile."""
        failed: list[BaseException] = []
        over = threading.Event()

        def run() -> None:
            try:
                wait()
            except BaseException as error:
                failed.append(error)
            over.set()

        threading.Thread(target=run, name="wait", daemon=True).start()
        while not over.is_set():
            if not self.advance():
                over.wait(_NAP_BUSY)
        if failed:
            raise failed[0]

    def _look(self, line: Line, what: str) -> None:
        if self.left:
            raise PeerLost(f"{what} broke off: this process has left the group")
        # What it did last may have come in the meantime.
        if (lost := line.lost()) and not line.advance() and (lost := line.lost()):
            raise PeerLost(f"{what} broke off: {lost} gone")
