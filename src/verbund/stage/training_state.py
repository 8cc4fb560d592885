"""How far a training is: the same in all workers, but for the seconds."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from verbund.job import Train
from verbund.stage.judge import Judge


class TrainingState:
    """Steps, samples and seconds so far, and what was best.

    Args:
        settings: of the training.
        total_steps: that it has, if known.
        saved: what a checkpoint or another worker has of it, JSON values; empty at the beginning.
    """

    def __init__(self, settings: Train, total_steps: int | None, saved: Mapping[str, Any]) -> None:
        self._settings = settings
        self.total_steps = total_steps
        self.step = int(saved.get("step", 0))
        self.first_step = int(saved.get("first_step", self.step))
        """Where this start of the run began."""
        self.samples = int(saved.get("samples", 0))
        self.loss = math.nan
        """Of the last step."""
        self.judge = Judge(settings, saved)
        self.validated = self.saved = -1
        """The steps of the last validation and save."""
        self._former_seconds = float(saved.get("seconds", 0.0))
        self._begun = time.monotonic()

    @property
    def seconds(self) -> float:
        """That training has taken, in former runs too."""
        return self._former_seconds + time.monotonic() - self._begun

    @property
    def out_of_time(self) -> bool:
        """Whether the job has had its `train.seconds`."""
        return self._settings.seconds is not None and self.seconds >= self._settings.seconds

    def known(self, loss_scale: dict[str, Any] | None, recent: Sequence[Sequence[float]]) -> dict[str, Any]:
        """What another worker needs to go on from here besides the replica's tensors, JSON values.

        Args:
            loss_scale: of fp16, if that is the precision.
            recent: the journal's rows of the last steps.
        """
        return {
            "step": self.step,
            "samples": self.samples,
            "first_step": self.first_step,
            "seconds": self.seconds,
            "loss_scale": loss_scale,
            "recent": recent,
            "judged": self.judge.judged,
            **self.judge.state(),
        }

    def go_on(self, step: int, known: Mapping[str, Any], new: bool) -> bool:
        """Goes on from where another worker is, with what that knows.

        Args:
            step: how many are done there.
            known: see there.
            new: whether this worker has trained nothing yet.

        Returns:
            whether this worker was elsewhere.
        """
        moved = new or step != self.step
        if moved:
            self.judge = Judge(self._settings, known)
        self.step, self.samples, self.first_step = step, int(known["samples"]), int(known["first_step"])
        self.validated = self.saved = -1  # what some have not finished is done again by all
        return moved

    def take_seconds(self, known: Mapping[str, Any]) -> None:
        """The training has taken as long as another worker knows."""
        self._former_seconds = float(known["seconds"]) - (time.monotonic() - self._begun)
