"""What a worker records of its steps: rows of the journal, running totals, and the progress that the user sees."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from verbund.cluster.worker import Worker
from verbund.exchange.local_steps import LocalSteps
from verbund.mesh.replica import Replica
from verbund.observe.events import Journal
from verbund.observe.network import Links
from verbund.stage.island import Island
from verbund.stage.recording import count
from verbund.stage.training_state import TrainingState

_PROGRESS_SECONDS = 0.1
_RECENT_SECONDS = 3.0
"""For how long all workers keep what they know of steps, which one of them journals once a second."""
# Their numbers among a step's collectives, beyond those of any gradients.
GATHERING, COMPARISON = 1 << 20, (1 << 20) + 1

Row = tuple[int, float, float, int, float]


class StepRecord:
    """One worker's.

    Args:
        worker: the line to the supervisor.
        island: this worker's, which says who speaks for all.
        journal: the process's own.
        links: its connections.
        exchange: between islands that train alone.
        keeps: whether this worker may have to journal the last steps in another one's place.
        samples: that were trained in former runs.
    """

    def __init__(
        self,
        worker: Worker,
        island: Island,
        journal: Journal,
        links: Links,
        exchange: LocalSteps | None,
        keeps: bool,
        samples: int,
    ) -> None:
        self.journal = journal
        self._worker, self._island, self._links, self._exchange = worker, island, links, exchange
        self._keeps = keeps
        self._reported, self._reported_samples = 0.0, samples
        self._recent: deque[tuple[float, Row]] = deque()
        self.done_at = time.monotonic()
        """When the last step was done."""

    @property
    def recent(self) -> list[Row]:
        """The journal's rows of the last steps."""
        return [row for _, row in self._recent]

    def step(self, state: TrainingState, weight: float, size: int, replica: Replica) -> None:
        """Records the step before `state.step`.

        Args:
            state: after it.
            weight: of its samples.
            size: how many samples.
            replica: that has taken it.
        """
        mesh, now = self._island.mesh, time.monotonic()
        self.done_at = now
        row = (state.step - 1, state.loss, weight, size, float(replica.optimizer.param_groups[0]["lr"]))
        if mesh.rank == 0 or (self._exchange is not None and mesh.leads):
            self.journal.step(*row)
        if self._keeps:
            self._recent.append((now, row))
            while now - self._recent[0][0] > _RECENT_SECONDS and len(self._recent) > 2:
                self._recent.popleft()
        if mesh.rank == 0 and now - self._reported >= _PROGRESS_SECONDS:
            speed = (state.samples - self._reported_samples) / (now - self._reported) if self._reported else 0.0
            self._worker.mention("progress", step=state.step, loss=state.loss, samples_per_second=speed)
            self._reported, self._reported_samples = now, state.samples
        if self.journal.due:
            self.write(replica)

    def again(self, known: dict[str, Any], step: int) -> None:
        """Journals the last steps before `step`: whoever did so may have gone before it wrote them, or not have come so
        far. `known` is what another worker knows; see `TrainingState.known`. A new worker keeps that too, as it may be
        the next that all others ask."""
        rows = {int(row[0]): row for row in [*self.recent, *known["recent"]] if row[0] < step}
        if self._keeps:
            now = time.monotonic()
            self._recent = deque((now, rows[number]) for number in sorted(rows))
        if self._island.mesh.rank == 0:
            for row in rows.values():
                self.journal.step(*row)

    def collective(self, step: int, index: int, start: int, end: int) -> None:
        """Records a collective that is none of a step's gradients."""
        if self._island.mesh.world > 1:
            self.journal.collective(step, index, start, start, end)

    def write(self, replica: Replica) -> None:
        """Writes what was recorded, and the running totals, to the journal."""
        count(self.journal, self._links, self._island.shared_bytes)
        count_combined(self.journal, replica, self._exchange)
        self.journal.flush()


def count_combined(journal: Journal, replica: Replica, exchange: LocalSteps | None) -> None:
    """Records the running totals of what replicas and islands sent each other."""
    if exchange is not None:
        journal.totals("exchange", **exchange.totals())
    if replica.compression is not None:
        journal.totals("compression", **replica.compression.totals())
