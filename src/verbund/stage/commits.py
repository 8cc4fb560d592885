"""Checkpoints as the supervisor sees them: parts arrive from the workers, and a step is committed when all are
there."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from verbund import checkpoint
from verbund.errors import RunFailed, VerbundError
from verbund.job import Checkpoint as Settings
from verbund.observe.events import Journal
from verbund.run import Run


@dataclass
class _Pending:
    era: int = 0
    parts: dict[int, dict[str, Any]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    state: dict[str, Any] | None = None
    seconds: float = 0.0


class Commits:
    """Collects the parts of each save; commits, prunes, or gives a failed save up and says so.

    Args:
        run: where the checkpoints lie.
        workers: how many parts make a checkpoint.
        settings: what is kept.
        journal: gets `checkpoint` and `checkpoint_failed`.
    """

    def __init__(self, run: Run, workers: int, settings: Settings, journal: Journal) -> None:
        self._run = run
        self._workers = workers
        self._settings = settings
        self._journal = journal
        self._pending: dict[int, _Pending] = {}
        self._unsaved: list[str] = []
        self.step: int | None = None
        """The step of the newest checkpoint of this attempt."""
        self.warnings: list[str] = []

    def saved(self, fields: dict[str, Any]) -> str | None:
        """One process's part of one save. Returns a warning for the user if the save has failed.

        Raises:
            RunFailed: if it failed because the run's directory is gone, so that no later one can succeed.
        """
        step, era = int(fields["step"]), int(fields.get("era", 0))
        pending = self._pending.get(step)
        if pending is None or pending.era < era:  # a save that other members have begun is done again by these
            pending = self._pending[step] = _Pending(era)
        elif era < pending.era:
            return None
        if fields.get("failure"):
            who = fields.get("process") or f"worker {fields['part']}"
            pending.failures.append(f"{who}: {fields['failure']}")
        pending.parts[int(fields["part"])] = fields["record"]
        pending.state = fields.get("state") or pending.state
        pending.seconds = max(pending.seconds, float(fields["seconds"]))
        if len(pending.parts) < int(fields.get("parts", self._workers)):
            return None
        del self._pending[step]
        warning = self._commit(step, pending)
        if warning is None:
            for older in [other for other in self._pending if other < step]:
                del self._pending[older]  # of workers that were lost meanwhile; nobody completes it any more
                checkpoint.discard(self._run.checkpoints, older)
        return warning

    def _commit(self, step: int, pending: _Pending) -> str | None:
        start = time.monotonic()
        failure = pending.failures[0] if pending.failures else None
        state = pending.state or {}
        if failure is None:
            try:
                checkpoint.commit(self._run.checkpoints, step, list(pending.parts.values()), state)
            except (OSError, VerbundError) as error:
                failure = str(error)
        if failure is not None:
            checkpoint.discard(self._run.checkpoints, step)
            if state:
                self._prune(state)  # a full disk may have room again without what is kept too long
            self._journal.event("checkpoint_failed", step=step, failure=failure)
            self._unsaved.append(failure)
            self._run.check_there()
            warning = f"the checkpoint of step {step} could not be saved: {failure}. The earlier one is intact"
            self.warnings.append(warning)
            return warning
        self.step = step
        self._unsaved.clear()
        self._prune(state)
        size = sum(int(file["bytes"]) for part in pending.parts.values() for file in part.get("files", []))
        seconds = pending.seconds + time.monotonic() - start
        self._journal.event("checkpoint", step=step, seconds=round(seconds, 4), bytes=size)
        return None

    def discard_rest(self) -> None:
        """Removes what is left of saves that nobody will complete."""
        for step in self._pending:
            checkpoint.discard(self._run.checkpoints, step)
        self._pending.clear()

    def check_saved(self, step: int) -> None:
        """Checks, when the training has ended, that what it came to was saved; earlier saves may have failed.

        Raises:
            RunFailed: if there is no checkpoint of `step`, with the first failure since the last that was saved.
        """
        if self.step == step:
            return
        cause = self._unsaved[0] if self._unsaved else "its parts did not arrive"
        raise RunFailed(
            f"the model as it is after step {step} could not be saved: {cause}",
            where=str(self._run.checkpoints),
            fix=f"`verbund resume {self._run.path}` trains again what came after the last checkpoint",
        )

    def _prune(self, state: dict[str, Any]) -> None:
        budget = self._settings.disk_budget_mb
        checkpoint.prune(
            self._run.checkpoints,
            self._settings.keep,
            state.get("best_step"),
            int(budget * 1e6) if budget else None,
        )
