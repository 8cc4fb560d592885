"""How islands that train alone agree on the step after which they stop.

Where gradients are added up in every step, a wish to stop travels with them. Islands that train alone are at different
steps when it comes. So each worker promises not to go beyond the step that it is in without asking, and all stop after
the last of the steps promised; those that are behind train on until there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

from verbund.cluster.worker import Worker
from verbund.comm.wire import Message
from verbund.errors import RunFailed


class Agreement:
    """A worker's side.

    Args:
        worker: the line to the supervisor.
        deadline: seconds that the others' promises may take.
    """

    def __init__(self, worker: Worker, deadline: float) -> None:
        self._worker, self._deadline = worker, deadline
        self._lock = threading.Lock()
        self._step = 0
        self._promised: int | None = None
        self._known = threading.Event()
        self._until, self._reason = 0, ""
        self._wished = False
        worker.hears = self._hear
        if worker.stopping:  # it was told before it listened here
            self._promise()

    def ends(self, step: int) -> str | None:
        """Why training ends now that `step` steps are done; None if it goes on.

        Raises:
            RunFailed: if the others' promises did not come.
        """
        if self._worker.orphaned:
            return "interrupt"
        if self._worker.stopping:  # by a signal to this process alone, perhaps
            self.wish("interrupt")
        with self._lock:
            if self._promised is None or step < self._promised:
                self._step = step
                return None
        if not self._known.wait(self._deadline):
            raise RunFailed(f"the islands did not agree on a step to stop after within {self._deadline:.0f} s")
        return self._reason if step >= self._until else None

    def wish(self, reason: str) -> None:
        """Asks that all stop soon."""
        if not self._wished:
            self._wished = True
            self._worker.send("wish", reason=reason)

    def _hear(self, message: Message) -> None:
        if message.kind == "stop":
            self._promise()
        elif message.kind == "stop_after":
            self._until, self._reason = int(message.fields["step"]), str(message.fields["reason"])
            self._known.set()

    def _promise(self) -> None:
        with self._lock:
            if self._promised is not None:
                return
            self._promised = self._step + 1
        self._worker.send("promise", step=self._promised)


class Promises:
    """The supervisor's side.

    Args:
        workers: who promises: those that train.
        tell_all: sends a message to all of them.
    """

    def __init__(self, workers: Callable[[], Iterable[int]], tell_all: Callable[..., Any]) -> None:
        self._workers, self._tell_all = workers, tell_all
        self._steps: dict[int, int] = {}
        self.reason: str | None = None
        """Why all are to stop, if a worker has asked for it."""
        self._told = False

    def wish(self, reason: str) -> None:
        """A worker asks that all stop; the first reason counts."""
        if self.reason is None:
            self.reason = reason
            self._tell_all("stop")

    def promise(self, rank: int, step: int) -> None:
        """A worker will not go beyond `step` before it knows when all stop."""
        self._steps[rank] = step
        self.settle()

    def settle(self) -> None:
        """Tells all when they stop, once all have promised who train still."""
        workers = list(self._workers())
        if self._told or not self._steps or not all(rank in self._steps for rank in workers):
            return
        self._told = True
        last = max(self._steps[rank] for rank in workers)
        self._tell_all("stop_after", step=last, reason=self.reason or "interrupt")
