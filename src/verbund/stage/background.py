"""Writing while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable

from verbund.comm.files import Location
from verbund.errors import RunFailed


class Background:
    """One save at a time, in a thread.

    Args:
        place: where saves lie, for messages.
        deadline: seconds that one may take.
    """

    def __init__(self, place: Location, deadline: float) -> None:
        self._place, self._deadline = place, deadline
        self._thread: threading.Thread | None = None
        self.last: int | None = None
        """The step of the newest save that was begun."""

    def start(self, step: int, write: Callable[[], None]) -> None:
        """Begins a save; `wait` for the former one comes first."""
        self.last = step
        self._thread = threading.Thread(target=write, name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Waits until the save under way is written.

        Raises:
            RunFailed: if that takes longer than the deadline.
        """
        if self._thread is None:
            return
        self._thread.join(self._deadline)
        if self._thread.is_alive():
            raise RunFailed(
                f"the checkpoint of step {self.last} is not written after {self._deadline:.0f} s",
                where=str(self._place),
                fix="The disk is too slow or hangs; `cluster.step_deadline` is the limit",
            )
        self._thread = None
