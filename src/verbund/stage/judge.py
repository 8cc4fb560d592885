"""What validations decide: which step was the best, and whether training ends."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from verbund.errors import InputError
from verbund.job import Train
from verbund.observe.directions import larger_is_better


class Judge:
    """Looks at each validation's metrics.

    Args:
        settings: the ends that depend on metrics: `target` and `patience`.
        state: what `state` gave, to go on from; empty at the beginning. With `judged`, that too.
    """

    def __init__(self, settings: Train, state: Mapping[str, Any]) -> None:
        self._settings = settings
        self.best: float | None = state.get("best")
        self.best_step: int | None = state.get("best_step")
        self._patient: float | None = state.get("patient")
        self._stale = int(state.get("validations_without_gain", 0))
        step, reason = state.get("judged", (-1, None))
        self.judged: tuple[int, str | None] = (int(step), reason)
        """The step whose validation was looked at last, and what came of it."""

    def state(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "best": self.best,
            "best_step": self.best_step,
            "patient": self._patient,
            "validations_without_gain": self._stale,
        }

    def ends(self, metrics: Mapping[str, Any], step: int) -> str | None:
        """Why training ends after the validation at `step`, if it does.

        Raises:
            InputError: if a metric that is watched is none of the job's.
        """
        if self.judged[0] != step:  # one that was done again tells nothing new
            self.judged = (step, self._judge(metrics, step))
        return self.judged[1]

    def _judge(self, metrics: Mapping[str, Any], step: int) -> str | None:
        target, patience = self._settings.target, self._settings.patience
        watched = target.metric if target else patience.metric if patience else None
        if watched is None:
            return None
        value = _metric(metrics, watched)
        sign = 1.0 if larger_is_better(watched) else -1.0
        if self.best is None or sign * value > sign * self.best:
            self.best, self.best_step = value, step
        if target and sign * value >= sign * target.value:
            return "target"
        if patience:
            return self._patience(_metric(metrics, patience.metric), larger_is_better(patience.metric))
        return None

    def _patience(self, value: float, larger: bool) -> str | None:
        patience = self._settings.patience
        assert patience is not None
        gain = math.inf if self._patient is None else (value - self._patient) * (1.0 if larger else -1.0)
        if gain > patience.minimum_gain:
            self._patient, self._stale = value, 0
        else:
            self._stale += 1
        return "patience" if self._stale >= patience.validations else None


def _metric(metrics: Mapping[str, Any], name: str) -> float:
    value = metrics.get(name)
    if not isinstance(value, (int, float)):
        known = ", ".join(key for key, v in metrics.items() if isinstance(v, (int, float)))
        raise InputError(f"`{name}` is no metric of this job", where="train", fix=f"Those that are numbers: {known}")
    return float(value)
