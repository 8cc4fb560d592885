"""Ctrl-C and SIGTERM: where they end the command at once, and where they wait until something is whole.

Imports next to nothing: the command installs the first of these before it imports anything slow.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

_SAME_WISH_SECONDS = 1.0


class Interrupt(BaseException):
    """The user wants the command to end, and nothing is under way that must be finished first."""


class Interrupts:
    """Within the block Ctrl-C and SIGTERM are counted; the innermost block gets them. Only the main thread's blocks
    change anything: Python gives signals to no other.

    Args:
        ending: raise `Interrupt` wherever the program is. A second one within a second of the first is the same wish,
            and does not disturb what the first one's way out cleans up.
        deferring: deliver to the block around this one, when this one ends, what came in between; not on the way out of
            an error, which ends the command anyway.
    """

    def __init__(self, *, ending: bool = False, deferring: bool = False) -> None:
        self.count = 0
        self._ending = ending
        self._deferring = deferring
        self._raised = 0.0
        self._last = signal.SIGINT
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._former[number] = signal.signal(number, self._came)
        return self

    def __exit__(self, *_: object) -> None:
        for number, former in self._former.items():
            signal.signal(number, former)
        if self._deferring and self.count and sys.exc_info()[1] is None:
            signal.raise_signal(self._last)

    def _came(self, number: int, _: FrameType | None) -> None:
        self.count += 1
        self._last = signal.Signals(number)
        if self._ending and time.monotonic() - self._raised > _SAME_WISH_SECONDS:
            self._raised = time.monotonic()
            raise Interrupt
