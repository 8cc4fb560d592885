"""How far a training with servers is, as its first worker tells the supervisor now and then."""

from __future__ import annotations

import math
import time

from verbund.cluster.worker import Worker
from verbund.stage.tickets import Tickets

_SECONDS = 0.1


class Progress:
    """What was told.

    Args:
        worker: the line to the supervisor.
        tickets: of the training.
        begin: the step that it begins with.
        says: whether this worker is the one.
    """

    def __init__(self, worker: Worker, tickets: Tickets, begin: int, says: bool) -> None:
        self._worker, self._tickets, self._says = worker, tickets, says
        self._when, self._step = 0.0, begin

    def say(self, step: int, loss: float, last: bool = False) -> None:
        """All are so far; what is not new, or comes too soon, is not told.

        Args:
            step: steps done.
            loss: of the newest.
            last: nothing comes after it.
        """
        now, former, when = time.monotonic(), self._step, 0.0 if last else self._when
        if not self._says or now - when < _SECONDS or step <= former or not math.isfinite(loss):
            return
        samples = sum(sum(self._tickets.sizes(ticket)) for ticket in range(former, step)) if when else 0
        self._worker.mention("progress", step=step, loss=loss, samples_per_second=samples / (now - when))
        self._when, self._step = now, step

    def samples_before(self, step: int) -> int:
        """The samples of all tickets before."""
        whole, left = divmod(step, self._tickets.lengths.per_epoch)
        return sum(
            times * sum(sum(self._tickets.sizes(ticket)) for ticket in range(count))
            for times, count in ((whole, self._tickets.lengths.per_epoch), (1, left))
            if times
        )
