"""The learning rate as a pure function of the optimiser step, so that it is the same after any resume."""

from __future__ import annotations

import math

import torch

from verbund.errors import InputError
from verbund.job import Schedule

BASE = "initial_lr"
"""Key of a parameter group that holds its rate before the schedule; torch's schedulers use the same."""


def factor(schedule: Schedule, step: int, total_steps: int | None) -> float:
    """What the base rates are multiplied with at a step.

    Warm-up rises through 1/(w+1), 2/(w+1), ..., so that no step is taken with a rate of 0; the step after it
    has the full rate. The decay runs from there to the end, as in torch's `LinearLR`, `CosineAnnealingLR` and
    `StepLR` behind a `SequentialLR`; beyond the end the last value stays.

    Args:
        schedule: the job's.
        step: the optimiser step about to be taken, from 0.
        total_steps: steps of the whole training, if known; `schedule.steps` goes before it.

    Raises:
        InputError: if a linear or cosine decay has no known end, or ends within the warm-up.
    """
    length = _decay_length(schedule, total_steps)
    if step < schedule.warmup:
        return (step + 1) / (schedule.warmup + 1)
    after = step - schedule.warmup
    if schedule.name == "step":
        return float(schedule.factor ** (after // (schedule.every or 1)))
    if length is None:
        return 1.0
    share = min(after / length, 1.0)
    if schedule.name == "linear":
        return 1.0 - (1.0 - schedule.final) * share
    return schedule.final + (1.0 - schedule.final) * (1.0 + math.cos(math.pi * share)) / 2.0


def apply(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Sets every group's rate to its own base rate times `factor`. The base rate is remembered in the
    group."""
    for group in optimizer.param_groups:
        base = group.get(BASE)
        if base is None:
            base = group[BASE] = group["lr"]
        group["lr"] = base * factor


def _decay_length(schedule: Schedule, total_steps: int | None) -> int | None:
    """Steps from the end of the warm-up to the end of the decay; None for schedules without an end."""
    if schedule.name not in ("linear", "cosine"):
        return None
    end = schedule.steps or total_steps
    if end is None:
        raise InputError(
            f"a `{schedule.name}` decay has no known end: the training ends by time, target or patience",
            where="train.schedule.steps",
            fix="Give `train.schedule.steps`, or end the training by `train.steps` or `train.epochs`",
        )
    if end <= schedule.warmup:
        raise InputError(
            f"the decay ends at step {end}, within the warm-up of {schedule.warmup} steps",
            where="train.schedule.warmup",
            fix=f"Give at most {end - 1} steps of warm-up",
        )
    return end - schedule.warmup
