"""When a training ends by its lengths, and what is due on the way."""

from __future__ import annotations

from dataclasses import dataclass

from verbund.job import Train


@dataclass(frozen=True)
class Lengths:
    """The lengths of a training, counted in steps; those of a federation are rounds.

    Args:
        train: the job's section.
        per_epoch: steps of an epoch.
    """

    train: Train
    per_epoch: int

    def reached(self, step: int) -> str | None:
        """Which of the training's lengths, `steps` or `epochs`, is reached after so many steps, if one is."""
        if self.train.steps is not None and step >= self.train.steps:
            return "steps"
        if self.train.epochs is not None and step >= self.train.epochs * self.per_epoch:
            return "epochs"
        return None

    def due(self, every: int | str, step: int) -> bool:
        """Whether what is done every so many steps, every `epoch` or at the `end` is due after so many."""
        if every == "epoch":
            return step % self.per_epoch == 0
        return every != "end" and step % int(every) == 0
